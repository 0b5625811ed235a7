"""Pictures that can be read, also on paper without colors: what is wrong with one.

Needs matplotlib, so tests import it only after they have asked for that.
"""

from collections.abc import Callable, Iterator
from itertools import combinations

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


def areas(figure: Figure) -> list[Patch]:
    """What is filled, from below to above."""
    patches = [patch for axes in figure.axes for patch in axes.patches]
    is_area = lambda patch: (  # noqa: E731
        patch.get_visible()
        and patch.get_fill()
        and patch.get_facecolor()[3] > 0
        and not isinstance(patch, FancyArrowPatch)
    )
    return sorted(filter(is_area, patches), key=lambda patch: patch.get_zorder())


def is_inside(text: Text, patch: Patch) -> bool:
    box = extent(text)
    return patch.contains_point(((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2))


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
    labels = texts(figure)
    found = []
    for patch in areas(figure):
        says = [text.get_text() for text in labels if is_inside(text, patch)]
        fill = patch.get_facecolor(), patch.get_hatch()
        found.append((patch.get_window_extent(), fill, gray(fill[0]), says))
    for (box, fill, light, says), (box2, fill2, light2, says2) in combinations(found, 2):
        if fill == fill2 or fill[1] != fill2[1] or abs(light - light2) >= GRAY_DISTANCE:
            continue
        if overlap(box, box2, by=-TOUCH) and not (says and says2):
            yield f"neighbors are alike in gray: {light:.0f} {says} and {light2:.0f} {says2}"


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
    patches = areas(figure)[::-1]
    for text in texts(figure):
        for point in ends_and_middle(extent(text)):
            light, hatch = behind(text, point, patches)
            if hatch:
                yield f"{text.get_text()!r} is written on a hatch"
            elif abs(gray(text.get_color()) - light) < CONTRAST:
                yield f"{text.get_text()!r} is too pale on {light:.0f}"
            else:
                continue
            break


def ends_and_middle(box: Bbox) -> list[Point]:
    y = (box.y0 + box.y1) / 2
    return [(box.x0, y), ((box.x0 + box.x1) / 2, y), (box.x1, y)]


def behind(text: Text, point: Point, patches: list[Patch]) -> tuple[float, str | None]:
    """Gray value and hatch of the area at this point of a text; paper is white."""
    own = text.get_bbox_patch()
    patch = own or next((patch for patch in patches if patch.contains_point(point)), None)
    return (gray(patch.get_facecolor()), patch.get_hatch()) if patch else (255, None)


RULES: list[Callable[[Figure], Iterator[str]]] = [
    cut_off,
    one_on_the_other,
    legend_on_data,
    areas_alike,
    lines_alike,
    pale_texts,
]
