"""Pictures whose texts can be read: what is wrong with one.

Needs matplotlib, so tests import it only after they have asked for that.
"""

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from tutorials.figures.style import texts

CONTRAST = 100  # between a text and what is behind it
Point = tuple[float, float]


def faults(figure: Figure) -> list[str]:
    """A sentence for each; none if the picture can be read."""
    figure.draw_without_rendering()
    return [fault for rule in RULES for fault in rule(figure)]


def gray(color) -> float:
    """How light a color is on white paper, from 0 to 255."""
    *rgb, alpha = to_rgba(color)
    light = sum(part * weight for part, weight in zip(rgb, (0.299, 0.587, 0.114)))
    return 255 * (alpha * light + 1 - alpha)


def extent(text: Text) -> Bbox:
    """Of a note without its arrow."""
    return Text.get_window_extent(text)


def overlap(a: Bbox, b: Bbox, by: float = 0) -> bool:
    return min(a.x1, b.x1) - max(a.x0, b.x0) > by and min(a.y1, b.y1) - max(a.y0, b.y0) > by


class Area(NamedTuple):
    """What is filled."""

    patch: Patch
    box: Bbox
    light: float
    hatch: str | None

    def covers(self, point: Point) -> bool:
        return self.box.contains(*point) and self.patch.contains_point(point)


def areas(figure: Figure) -> list[Area]:
    """From below to above."""
    patches = [patch for axes in figure.axes for patch in axes.patches if is_area(patch)]
    return [
        Area(patch, patch.get_window_extent(), gray(patch.get_facecolor()), patch.get_hatch())
        for patch in sorted(patches, key=lambda patch: patch.get_zorder())
    ]


def is_area(patch: Patch) -> bool:
    is_filled = patch.get_fill() and patch.get_facecolor()[3] > 0
    return patch.get_visible() and is_filled and not isinstance(patch, FancyArrowPatch)


def middle(box: Bbox) -> Point:
    return (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2


# --- the rules ---


def cut_off(figure: Figure) -> Iterator[str]:
    for text in texts(figure):
        box = extent(text)
        if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1:
            yield f"{text.get_text()!r} is cut off"


def one_on_the_other(figure: Figure) -> Iterator[str]:
    boxes = [(text.get_text(), extent(text)) for text in texts(figure)]
    for (one, box), (other, other_box) in combinations(boxes, 2):
        if overlap(box, other_box, by=1):
            yield f"{one!r} lies on {other!r}"


def pale_texts(figure: Figure) -> Iterator[str]:
    """A text needs contrast, at both of its ends, too; and nothing is written on a hatch."""
    found = areas(figure)[::-1]
    for text in texts(figure):
        for point in ends_and_middle(extent(text)):
            light, hatch = behind(text, point, found)
            if hatch:
                yield f"{text.get_text()!r} is written on a hatch"
                break
            if abs(gray(text.get_color()) - light) < CONTRAST:
                yield f"{text.get_text()!r} is too pale on {light:.0f}"
                break


def ends_and_middle(box: Bbox) -> list[Point]:
    x, y = middle(box)
    return [(box.x0, y), (x, y), (box.x1, y)]


def behind(text: Text, point: Point, found: list[Area]) -> tuple[float, str | None]:
    """Gray value and hatch of what is behind a text at this point; paper is white."""
    own = text.get_bbox_patch()
    if own:
        return gray(own.get_facecolor()), own.get_hatch()
    return next(((area.light, area.hatch) for area in found if area.covers(point)), (255, None))


RULES: list[Callable[[Figure], Iterator[str]]] = [
    cut_off,
    one_on_the_other,
    pale_texts,
]
