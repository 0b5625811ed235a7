"""VirtualCache: a KV cache in which the blocks of a sequence also have consecutive addresses. It
puts vAttention's idea (ASPLOS 2025) under the block manager: the block tables stay, but attention
does not read them. Instead, memory is mapped as they say."""

import math
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.config import Limits
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import CacheShape, KVCache
from nanovllm.topics.vattention.memory import System, VirtualMemory

ALIGNMENT = 16  # bytes: vector instructions want each token to begin at such a multiple
NO_ROW = -1
Table = list[int]  # the blocks of a sequence


class Pieces(NamedTuple):
    """How blocks are cut: one piece with all layers, or one piece for each layer."""

    num: int
    size: int  # bytes
    num_rows: int  # for which the system has enough mappings

    @property
    def quality(self) -> tuple[int, int, int]:
        """The order of preference: least memory, then most rows, then the keys of a layer close
        together."""
        num_bytes = self.num * self.size
        return -num_bytes, self.num_rows, self.num


class VirtualShape:
    """The shape of a VirtualCache with any number of blocks. Only whole pages can be mapped, so a
    piece has whole pages. The tokens of a row must have equal distances, also from one piece to the
    next, or no tensor could describe the row. So each token is padded until the last token of a
    piece ends where a page ends."""

    def __init__(self, shape: CacheShape, limits: Limits, system: System):
        self.shape = shape
        self.system = system
        self.block_size = shape.block_size
        self.row_blocks = -(-limits.max_model_len // shape.block_size)
        cuts = [self.cut(1, limits), self.cut(shape.num_layers, limits)]
        self.pieces = max(cuts, key=lambda pieces: pieces.quality)
        self.block_bytes = self.pieces.num * self.pieces.size
        self.state_bytes = 0  # a model with states is refused
        self._check(limits)

    def cut(self, num: int, limits: Limits) -> Pieces:
        needed = self.shape.block_bytes // num
        unit = math.lcm(self.system.page_bytes, ALIGNMENT * self.block_size)
        size = -(-needed // unit) * unit
        num_mappings = (self.row_blocks + 1) * num  # what follows a sequence is one, too
        num_rows = self.system.num_mappings // num_mappings
        return Pieces(num, size, min(num_rows, limits.max_num_seqs))

    def _check(self, limits: Limits) -> None:
        """Raises ValueError for blocks that the system cannot map."""
        page = self.system.page_bytes
        whole_pages = -(-self.shape.block_bytes // page) * page
        if self.block_bytes >= 2 * whole_pages:
            problem = f"its {self.shape.block_bytes:,} bytes would take {self.block_bytes:,}"
            why = f"so that its tokens divide pages of {page:,} bytes evenly: use a power of two"
            raise ValueError(f"block_size={self.block_size} is not allowed: {problem}, {why}")
        if not self.pieces.num_rows:
            sequence = f"a sequence of max_model_len={limits.max_model_len} tokens"
            needed = f"{sequence} in blocks of {self.block_size} takes {self.row_blocks + 1:,}"
            found = f"there is room for {self.system.num_mappings:,} mappings (vm.max_map_count)"
            problem = f"{found}, and {needed}"
            raise ValueError(f"attention_backend='vattention' is not allowed: {problem}")

    def new_cache(self, num_blocks: int, device: torch.device) -> "VirtualCache":
        return VirtualCache(self, num_blocks)

    def seen_in(self, view: Tensor, length: int) -> Tensor:
        """The tensor that lies in these bytes: n times `length` tokens, piece after piece. [2,
        num_layers, n, length, num_kv_heads, head_dim]"""
        layers, _, *heads, dtype = self.shape[:5]
        stride = self.pieces.size // self.block_size // dtype.itemsize
        # [pieces, n, length, numbers from one token to the next]
        numbers = view.view(dtype).unflatten(0, (self.pieces.num, -1, length, stride))
        layers_of_piece = layers // self.pieces.num
        sizes = (layers_of_piece, 2, *heads)
        without_padding = numbers[..., : math.prod(sizes)]
        # [pieces, n, length, layers of a piece, 2, num_kv_heads, head_dim]
        parts = without_padding.unflatten(-1, sizes)
        return parts.permute(4, 0, 3, 1, 2, 5, 6).flatten(1, 2)  # pieces times layers: all layers


class VirtualCache(KVCache):
    """A KVCache whose blocks have two addresses: their own, and one in the row of a sequence. rows:
    keys and values of each layer, [2, rows, tokens of a row, num_kv_heads, head_dim]"""

    def __init__(self, shape: VirtualShape, num_blocks: int):
        size = num_blocks * shape.block_bytes
        memory = shape.system.new_memory(size)
        address = memory.reserve(size)
        memory.map(address, 0, size)
        blocks = memory.view(address, size)
        super().__init__(shape.seen_in(blocks, shape.block_size))
        self.page_table = PageTable(shape, num_blocks, memory)
        rows = memory.view(self.page_table.address, self.page_table.num_bytes)
        length = shape.row_blocks * shape.block_size
        by_layer = shape.seen_in(rows, length)
        self.rows = by_layer.unbind(1)

    def show(self, batch: Batch) -> list[int]:
        """Maps the blocks of each sequence of a step into a row. A sequence gets NO_ROW if no row
        is left. A last block that the step begins becomes zeros: a window also has the keys behind
        the end of a short sequence. Their weight is 0, but 0 times NaN is NaN."""
        block_ids = batch.block_tables.tolist()
        firsts = batch.cu_blocks.tolist()
        ends = batch.cu_seqlens_q.tolist()
        tables = []
        starts = []
        begun = []
        for b, context in enumerate(batch.context_lens.tolist()):
            i = (context - 1) // self.block_size
            table = block_ids[firsts[b] : firsts[b] + i + 1]
            tables.append(table)
            start = context - (ends[b + 1] - ends[b])
            starts.append(start)
            if start <= i * self.block_size:
                begun.append(table[i])
        self.tensor[:, :, begun] = 0
        return self.page_table.show(tables, starts)


class PageTable:
    """Which blocks are mapped into which row. A row is a range of addresses for the longest
    sequence. A row keeps its blocks until another sequence needs the row. So a running sequence
    finds its row by the block that it wrote last, and only a few blocks are mapped in a step; a new
    sequence that shares the blocks of a finished one finds them mapped."""

    def __init__(self, shape: VirtualShape, num_blocks: int, memory: VirtualMemory):
        self.shape = shape
        self.num_blocks = num_blocks
        self.memory = memory
        self.num_bytes = shape.pieces.num_rows * shape.row_blocks * shape.block_bytes
        self.address = memory.reserve(self.num_bytes)
        self.is_changing = False
        self.forget()

    def forget(self) -> None:
        num_rows = self.shape.pieces.num_rows
        self.shown: list[Table] = [[] for _ in range(num_rows)]
        self.num_filled = [0] * num_rows  # blocks of each row that may be read
        self.row_of: dict[int, int] = {}  # the block that a sequence wrote last -> its row

    def show(self, tables: list[Table], starts: list[int]) -> list[int]:
        """Returns the rows. The first `starts` tokens of each sequence are from earlier steps."""
        if self.is_changing:  # the last change was interrupted
            self.memory.wait()
            self.memory.unmap(self.address, self.num_bytes)
            self.forget()
        rows = self.choose(tables, starts)
        wanted = {}
        for row, table in zip(rows, tables):
            if row != NO_ROW:
                wanted[row] = table
        changed = [row for row, table in wanted.items() if self.shown[row] != table]
        if changed:
            self.is_changing = True
            self.memory.wait()
            for row in changed:
                self.change(row, wanted[row])
        self.is_changing = False
        self.row_of = {table[-1]: row for row, table in wanted.items()}
        return rows

    def choose(self, tables: list[Table], starts: list[int]) -> list[int]:
        free = dict.fromkeys(range(self.shape.pieces.num_rows))  # an ordered set
        rows = []
        for table, start in zip(tables, starts):
            # without earlier tokens, it is the last one of the table, which is not written yet
            last_block = table[(start - 1) // self.shape.block_size]
            row = self.row_of.get(last_block, NO_ROW)
            rows.append(row if row in free else NO_ROW)
            free.pop(row, None)
        begins = {}
        for row in free:
            if self.shown[row]:
                begins[self.shown[row][0]] = row
        new = [b for b, row in enumerate(rows) if row == NO_ROW]
        for b in new[: len(free)]:
            row = begins.get(tables[b][0], NO_ROW)
            if row not in free:
                row = next(iter(free))  # the first one: neighbors are computed together
            del free[row]
            rows[b] = row
        return rows

    def change(self, row: int, table: Table) -> None:
        """Maps the blocks that differ."""
        size = self.shape.pieces.size
        for i, (old, new) in enumerate(zip_longest(self.shown[row], table)):
            if new == old:
                continue
            for piece, place in enumerate(self.places_of(row, i)):
                if new is None:
                    self.memory.unmap(place, size)
                    self.num_filled[row] = 0
                else:
                    block = piece * self.num_blocks + new
                    self.memory.map(place, block * size, size)
        self.num_filled[row] = max(self.num_filled[row], len(table))
        self.shown[row] = table

    def fill(self, rows: slice, num_tokens: int) -> None:
        """Makes `num_tokens` tokens of these rows readable, with zeros after the end of a
        sequence."""
        num_blocks = -(-num_tokens // self.shape.block_size)
        for row in range(rows.start, rows.stop):
            for i in range(self.num_filled[row], num_blocks):
                for place in self.places_of(row, i):
                    self.memory.fill(place, self.shape.pieces.size)
            self.num_filled[row] = max(self.num_filled[row], num_blocks)

    def places_of(self, row: int, i: int) -> list[int]:
        """The addresses of the row's i-th block, one for each piece."""
        num_pieces, size, num_rows = self.shape.pieces
        places = []
        for piece in range(num_pieces):
            first = (piece * num_rows + row) * self.shape.row_blocks
            places.append(self.address + (first + i) * size)
        return places
