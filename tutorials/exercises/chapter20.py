"""Your answers to the exercises of chapter 20. To check them: python -m tutorials.check 20"""

from collections.abc import Callable
from itertools import permutations, zip_longest


# --- 20.1 ---
def changes(shown: list[int], table: list[int]) -> list[tuple[int, int | None]]:
    """What must change so that a row which shows some blocks shows those of a block table: of each
    place that differs, the place and its new block, or None if nothing may be seen there."""
    raise NotImplementedError


# --- 20.2 ---
def count_mappings(tables: list[list[int]], row_blocks: int) -> int:
    """How many lines /proc/self/maps has for these tables, in rows 0, 1, 2 and so on. A block is one
    page; a row has `row_blocks` places, and the next row begins right behind it."""
    raise NotImplementedError


# --- 20.3 ---
class Rows:
    """Shows the block tables of each step in rows, with as few calls as possible."""

    def __init__(self, num_rows: int, set_block: Callable[[int, int, int | None], None]):
        """In the beginning, no row shows anything. `set_block(row, place, block)` lets a block be seen
        at a place of a row, or nothing if it is None."""
        raise NotImplementedError

    def show(self, tables: list[list[int]]) -> list[int]:
        """The row of each table: another one for each. It shows this table then, and no more."""
        raise NotImplementedError
