"""Contents: which tokens are in each block, as far as the plans say. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.block_manager import Moves
from nanovllm.schedule import Item
from nanovllm.sequence import Sequence


@dataclass(eq=False, slots=True)
class Written:
    """Tokens that a sequence has written one behind the other, up to `end`."""

    seq: Any  # a Sequence; None of a block that nobody has written
    table: list[int]  # of its blocks; after a preemption, it has another list
    end: int


Mark = tuple[Written, int]  # of a block: its last tokens, and its place in the table
NOTHING: Any = (Written(None, [], 0), 0)


@dataclass(eq=False, repr=False)
class Contents:
    """Follows what the steps write and move, to find a sequence that reads other tokens than its
    own. Only blocks that are new to a sequence are compared with its tokens."""

    block_size: int
    written: dict[int, Mark] = field(default_factory=dict)  # by block, and by ~host block

    def go_on(self, items: Iterable[Item], moves: Moves) -> tuple[Sequence, int] | None:
        """Moves and writes the blocks of a step. A sequence that reads a block with other tokens
        than its own, and the block; or None."""
        self._move(moves)
        size = self.block_size
        written = self.written
        news = []  # sequences that do not go on behind what they have written themselves
        for seq, start, num_tokens in items:
            table = seq.block_table
            first = (start - 1) // size
            run, _ = mark = written.get(table[first], NOTHING)
            if run.end != start or run.table is not table:
                news.append((seq, start, mark))
                run = Written(seq, table, start)
                first = start // size - 1
            run.seq = seq
            run.end = start + num_tokens
            last = (run.end - 1) // size
            while first < last:
                first += 1
                written[table[first]] = run, first
        for seq, start, mark in news:
            block_id = self._wrong_block(seq, start, mark)
            if block_id is not None:
                return seq, block_id
        return None

    def _move(self, moves: Moves) -> None:
        written = self.written
        out = [(block_id, ~host_id) for block_id, host_id in moves.swaps_out.items()]
        back = [(~host_id, block_id) for host_id, block_id in moves.swaps_in.items()]
        for source, target in out + back + moves.copies:
            run, place = written[target] = written.get(source, NOTHING)
            written[source] = replace(run), place  # the run goes on in one of the two blocks

    def _wrong_block(self, seq: Sequence, start: int, last: Mark) -> int | None:
        """The block that has other tokens than the first `start` ones of the sequence. `last` says
        what the last of these blocks held before the step."""
        size = self.block_size
        ends: dict[Sequence, tuple[int, int]] = {}
        for i, block_id in enumerate(seq.block_table[: -(-start // size)]):
            end = min(start, (i + 1) * size)
            run, place = last if end % size else self.written.get(block_id, NOTHING)
            if place != i or run.end < end:
                return block_id
            ends[run.seq] = end, block_id
        for writer, (end, block_id) in ends.items():
            own, other = [
                (one.request.root_prefix_id, one.token_ids[:end]) for one in (seq, writer)
            ]
            if own != other:
                return block_id
        return None
