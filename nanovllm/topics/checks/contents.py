"""Contents: which tokens are in each block, as far as the plans say. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from nanovllm.block_manager import Moves
from nanovllm.schedule import Item
from nanovllm.sequence import Sequence

# which sequence has written a block last, the end of its tokens there, and its table, which is
# another list after a preemption
Mark = tuple[Sequence, int, list[int]]


@dataclass(eq=False, repr=False)
class Contents:
    """Follows what the steps write and move, to find a sequence that reads other tokens than its
    own. Only blocks that are new to a sequence are compared with its tokens."""

    block_size: int
    written: dict[int, Mark | None] = field(default_factory=dict)  # by block
    on_host: dict[int, Mark | None] = field(default_factory=dict)  # by host block

    def go_on(self, items: Iterable[Item], moves: Moves) -> tuple[Sequence, int] | None:
        """Moves and writes the blocks of a step. A sequence that reads a block with other tokens
        than its own, and the block; or None."""
        self._move(moves)
        size = self.block_size
        written = self.written
        news = []  # sequences that do not go on behind what they have written themselves
        for seq, start, num_tokens in items:
            table = seq.block_table
            end = start + num_tokens
            if start > 0:
                i = (start - 1) // size
                mark = written.get(table[i])
                if mark is None or mark[1] != start or mark[2] is not table:
                    news.append((seq, start, mark))
            last = (end - 1) // size
            for i in range(start // size, last):
                block_end = (i + 1) * size
                written[table[i]] = seq, block_end, table
            written[table[last]] = seq, end, table
        for seq, start, mark in news:
            block_id = self._wrong_block(seq, start, mark)
            if block_id is not None:
                return seq, block_id
        return None

    def _move(self, moves: Moves) -> None:
        for block_id, host_id in moves.swaps_out.items():
            self.on_host[host_id] = self.written.get(block_id)
        for host_id, block_id in moves.swaps_in.items():
            self.written[block_id] = self.on_host.get(host_id)
        for source, target in moves.copies:
            self.written[target] = self.written.get(source)

    def _wrong_block(self, seq: Sequence, start: int, last: Mark | None) -> int | None:
        """The block that has other tokens than the first `start` ones of the sequence. `last` says
        what the last of these blocks held before the step."""
        size = self.block_size
        ends: dict[Sequence, tuple[int, int]] = {}
        num_blocks = -(-start // size)
        for i, block_id in enumerate(seq.block_table[:num_blocks]):
            block_end = (i + 1) * size
            end = min(start, block_end)
            mark = last if end < block_end else self.written.get(block_id)
            if mark is None or not end <= mark[1] <= block_end:
                return block_id
            writer = mark[0]
            ends[writer] = end, block_id
        for writer, (end, block_id) in ends.items():
            has_salt = writer.request.first_prefix == seq.request.first_prefix
            has_tokens = writer.token_ids[:end] == seq.token_ids[:end]
            if not (has_salt and has_tokens):
                return block_id
        return None
