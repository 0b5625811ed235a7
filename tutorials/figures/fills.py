"""How areas of pictures are filled: colors that differ in gray, too."""

from typing import NamedTuple


class Fill(NamedTuple):
    """How an area is filled. `ink` is the color of text that can be read on it."""

    color: str
    ink: str = "black"
    hatch: str = ""


# their gray values are 212, 162, 106 and 51 of 255
SKY = Fill("#BFD9EE")
ORANGE = Fill("#E69F00")
GREEN = Fill("#009E73", ink="white")
BLUE = Fill("#0B3C6F", ink="white")
EMPTY = Fill("white")
FILLS = (SKY, ORANGE, GREEN, BLUE)
WASTE = Fill("white", hatch="////")  # what is computed or held for nothing
