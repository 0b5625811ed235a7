"""What pictures share: boxes with a label inside, text, one way to save.

A picture says one thing. What it shows has its name beside it or inside; so it needs no legend.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis, Tick
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from tutorials.figures.fills import EMPTY, Fill

HERE = Path(__file__).resolve().parent
TITLE = 10  # sizes of letters
TEXT = 9
SMALL = 8


def new_figure(width: float, height: float) -> Figure:
    """Sizes are in inches. Pages show 120 dots of it in an inch."""
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def box(
    axes: Axes, x: float, y: float, width: float, height: float, fill: Fill, label: object = ""
) -> None:
    """A rectangle from its lower left corner on, with its label in the middle."""
    axes.add_patch(Rectangle((x, y), width, height, **style_of(fill)))
    write(axes, x + width / 2, y + height / 2, label, fill, ha="center")


def style_of(fill: Fill) -> dict:
    """What matplotlib must know of it."""
    edge = {"edgecolor": "0.35", "linewidth": 0.7}
    return {"facecolor": fill.color, "hatch": fill.hatch} | edge


def write(axes: Axes, x: float, y: float, text: object, on: Fill = EMPTY, **style) -> None:
    """Writes on what is filled so. A hatch does not go through the letters."""
    behind = {"facecolor": on.color, "edgecolor": "none", "pad": 1} if on.hatch else None
    style = {"va": "center", "fontsize": TEXT, "color": on.ink, "bbox": behind} | style
    axes.text(x, y, str(text), **style)


def point_out(
    axes: Axes, text: str, at: tuple[float, float], text_at: tuple[float, float], **style
) -> None:
    """A note, and an arrow from it to the one place that matters."""
    arrow = {"arrowstyle": "->", "shrinkA": 2, "shrinkB": 1}
    style = {"fontsize": TEXT, "va": "center", "arrowprops": arrow} | style
    axes.annotate(text, at, text_at, **style)


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=TITLE, loc="left")


def bare(axes: Axes, sides: Sequence[str] = ()) -> None:
    """Leaves of the frame only these sides, and no ticks elsewhere."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in sides)
    if "left" not in sides:
        axes.set_yticks([])
    if "bottom" not in sides:
        axes.set_xticks([])
    axes.tick_params(labelsize=SMALL)


def texts(figure: Figure) -> list[Text]:
    """All that can be read in the picture."""
    return [text for text in shown(figure) if isinstance(text, Text) and text.get_text().strip()]


def shown(artist: Artist) -> Iterator[Artist]:
    """The artist and all that it is made of, as far as they are drawn."""
    if not artist.get_visible():
        return
    yield artist
    for child in artist.get_children():
        if is_drawn(child, artist):
            yield from shown(child)


def is_drawn(child: Artist, parent) -> bool:
    """Axes may be without axis, and an axis has ticks beyond its ends."""
    if isinstance(child, Axis):
        return parent.axison
    if isinstance(child, Tick):
        low, high = sorted(parent.get_view_interval())
        return low <= child.get_loc() <= high
    return True


def save(figure: Figure, path: Path) -> None:
    """The file also has the texts: a test compares them with what would be drawn now."""
    figure.draw_without_rendering()  # only now there are labels of ticks
    figure.savefig(path, metadata={"Description": words(figure)})


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in texts(figure))
