"""Pictures that can be read, also on paper without colors: what is wrong with one.

Needs matplotlib, so tests import it only after they have asked for that.
"""

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from tutorials.figures.style import texts

GRAY_DISTANCE = 40  # of 255, between areas, and between lines
CONTRAST = 100  # between a text and what is behind it
TOUCH = 1.5  # pixels between areas that are neighbors
NEAR = 15  # pixels between a line and its name
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


def legend_on_data(figure: Figure) -> Iterator[str]:
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    for legend in filter(None, legends):
        if any(overlap(legend.get_window_extent(), axes.bbox) for axes in figure.axes):
            yield "a legend lies on data"


def areas_alike(figure: Figure) -> Iterator[str]:
    """Neighbors with different fills must differ in gray or hatch, or each says what it is."""
    labels = [(text.get_text(), middle(extent(text))) for text in texts(figure)]
    found = [
        (area, [text for text, point in labels if area.covers(point)]) for area in areas(figure)
    ]
    for (one, says), (other, says_too) in combinations(found, 2):
        is_same = one.patch.get_facecolor() == other.patch.get_facecolor()
        if is_same or one.hatch != other.hatch or (says and says_too):
            continue
        is_alike = abs(one.light - other.light) < GRAY_DISTANCE
        if is_alike and overlap(one.box, other.box, by=-TOUCH):
            values = f"{one.light:.0f} {says} and {other.light:.0f} {says_too}"
            yield f"neighbors are alike in gray: {values}"


def lines_alike(figure: Figure) -> Iterator[str]:
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_visible()]
        for line, other in combinations(lines, 2):
            distance = abs(gray(line.get_color()) - gray(other.get_color()))
            if style_of(line) == style_of(other) and distance < GRAY_DISTANCE:
                yield f"lines are alike in gray: {line.get_label()} and {other.get_label()}"
        for line in lines:
            names = [t for t in texts(figure) if t.get_text() == line.get_label()]
            if not any(is_near(line, text) for text in names):
                yield f"no text at the line says {line.get_label()!r}"


def style_of(line: Line2D) -> tuple:
    return line.get_linestyle(), line.get_marker()


def is_near(line: Line2D, text: Text) -> bool:
    path = line.get_transform().transform_path(line.get_path())
    return path.intersects_bbox(extent(text).padded(NEAR), filled=False)


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
    legend_on_data,
    areas_alike,
    lines_alike,
    pale_texts,
]
