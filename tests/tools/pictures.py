"""Pictures whose texts can be read: what is wrong with one.

Needs matplotlib, so tests import it only after they have asked for that.
"""

from collections.abc import Iterator
from itertools import combinations

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from tutorials.figures.style import texts


def faults(figure: Figure) -> list[str]:
    """A sentence for each; none if the picture can be read."""
    figure.draw_without_rendering()
    return [*cut_off(figure), *one_on_the_other(figure)]


def extent(text: Text) -> Bbox:
    """Of a note without its arrow."""
    return Text.get_window_extent(text)


def overlap(a: Bbox, b: Bbox, by: float = 0) -> bool:
    return min(a.x1, b.x1) - max(a.x0, b.x0) > by and min(a.y1, b.y1) - max(a.y0, b.y0) > by


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
