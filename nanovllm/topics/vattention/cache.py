"""VirtualCache: a KV cache in which the blocks of a sequence also have consecutive addresses. It
puts vAttention's idea (ASPLOS 2025) under the block manager: the block tables stay, but attention
does not read them. Instead, memory is mapped as they say."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from nanovllm.config import Limits
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import CacheShape, KVCache
from nanovllm.topics.vattention.memory import System, VirtualMemory

ALIGNMENT = 16  # bytes: vector instructions want each token to begin at such a multiple
NEW = -1  # in place of a row: not chosen yet
Table = list[int]  # the blocks of a sequence


class VirtualShape:
    """The shape of a VirtualCache with any number of blocks. Only whole pages can be mapped, so a
    block has whole pages. The tokens of a row must have equal distances, also from one block to the
    next, or no tensor could describe the row. So each token is padded until the last token of a
    block ends where a page ends."""

    def __init__(self, shape: CacheShape, limits: Limits, system: System):
        self.shape = shape
        self.system = system
        self.block_size = shape.block_size
        self.row_blocks = -(-limits.max_model_len // shape.block_size)
        unit = math.lcm(system.page_bytes, ALIGNMENT * shape.block_size)
        self.block_bytes = -(-shape.block_bytes // unit) * unit
        # what follows a sequence is a mapping, too
        num_rows = system.num_mappings // (self.row_blocks + 1)
        self.num_rows = min(num_rows, limits.max_num_seqs)
        self.state_bytes = 0  # a model with states is refused
        self._check(limits)

    def _check(self, limits: Limits) -> None:
        """Raises ValueError for blocks that the system cannot map."""
        page = self.system.page_bytes
        whole_pages = -(-self.shape.block_bytes // page) * page
        if self.block_bytes >= 2 * whole_pages:
            problem = f"its {self.shape.block_bytes:,} bytes would take {self.block_bytes:,}"
            why = f"so that its tokens divide pages of {page:,} bytes evenly: use a power of two"
            raise ValueError(f"block_size={self.block_size} is not allowed: {problem}, {why}")
        if not self.num_rows:
            sequence = f"a sequence of max_model_len={limits.max_model_len} tokens"
            needed = f"{sequence} in blocks of {self.block_size} takes {self.row_blocks + 1:,}"
            found = f"there is room for {self.system.num_mappings:,} mappings (vm.max_map_count)"
            problem = f"{found}, and {needed}"
            raise ValueError(f"attention_backend='vattention' is not allowed: {problem}")

    def new_cache(self, num_blocks: int, device: torch.device) -> "VirtualCache":
        return VirtualCache(self, num_blocks)

    def seen_in(self, view: Tensor, length: int) -> Tensor:
        """The tensor that lies in these bytes: n times `length` tokens. [2, num_layers, n, length,
        num_kv_heads, head_dim]"""
        layers, _, *heads, dtype = self.shape[:5]
        sizes = (layers, 2, *heads)
        stride = self.block_bytes // self.block_size // dtype.itemsize  # of a token
        tokens = view.view(dtype).view(-1, length, stride)
        without_padding = tokens[..., : math.prod(sizes)]
        # [n, length, num_layers, 2, num_kv_heads, head_dim]
        numbers = without_padding.unflatten(-1, sizes)
        return numbers.permute(3, 2, 0, 1, 4, 5)


class VirtualCache(KVCache):
    """A KVCache whose blocks have two addresses: their own, and one in the row of a sequence.
    `rows` is a KVCache, too: each of its blocks is a row."""

    def __init__(self, shape: VirtualShape, num_blocks: int):
        size = num_blocks * shape.block_bytes
        memory = shape.system.new_memory(size)
        address = memory.reserve(size)
        memory.map(address, 0, size)
        blocks = memory.view(address, size)
        if blocks.is_cuda:  # a GPU's memory comes with what its last owner has left there
            blocks.zero_()
        super().__init__(shape.seen_in(blocks, shape.block_size))
        self.page_table = PageTable(shape, memory)
        rows = memory.view(self.page_table.address, self.page_table.num_bytes)
        length = shape.row_blocks * shape.block_size
        self.rows = KVCache(shape.seen_in(rows, length))

    def show(self, batch: Batch) -> list[int] | None:
        """Maps the blocks of each sequence of a step into a row. None if there are too few rows."""
        if len(batch.context_lens) > self.rows.num_blocks:
            return None
        block_ids = batch.block_tables.tolist()
        firsts = batch.cu_blocks.tolist()
        ends = batch.cu_seqlens_q.tolist()
        tables = []
        starts = []
        for b, context in enumerate(batch.context_lens.tolist()):
            num_blocks = -(-context // self.block_size)
            end = firsts[b] + num_blocks
            tables.append(block_ids[firsts[b] : end])
            num_queries = ends[b + 1] - ends[b]
            starts.append(context - num_queries)
        return self.page_table.show(tables, starts)


def in_rows(batch: Batch) -> Batch:
    """The same step in a cache whose blocks are rows: each sequence has one block. The step itself
    if there are too few rows: then block tables must do."""
    cache = batch.kv_cache
    if not isinstance(cache, VirtualCache):  # a recorded step is in rows already
        return replace(batch)
    rows = cache.show(batch)
    if rows is None:
        return replace(batch)
    device = batch.slot_mapping.device
    tables = torch.tensor(rows, dtype=torch.int32).to(device)
    ends = batch.cu_seqlens_q[1:]
    token = torch.arange(len(batch.slot_mapping), device=device)
    seq = torch.searchsorted(ends, token, right=True)
    positions = token + (batch.context_lens - ends)[seq]
    return replace(
        batch,
        kv_cache=cache.rows,
        slot_mapping=cache.rows.slots(tables[seq], positions),
        cu_blocks=torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
        block_tables=tables,
    )


class PageTable:
    """Which blocks are mapped into which row. A row is a range of addresses for the longest
    sequence. A row keeps its blocks until another sequence needs the row. So a running sequence
    finds its row by the block that it wrote last, and only a few blocks are mapped in a step; a new
    sequence that shares the blocks of a finished one finds them mapped."""

    def __init__(self, shape: VirtualShape, memory: VirtualMemory):
        self.shape = shape
        self.memory = memory
        self.num_bytes = shape.num_rows * shape.row_blocks * shape.block_bytes
        self.address = memory.reserve(self.num_bytes)
        self.is_changing = False
        self.forget()

    def forget(self) -> None:
        self.shown: list[Table] = [[] for _ in range(self.shape.num_rows)]
        self.num_read = [0] * self.shape.num_rows  # blocks that the last step with the row reads
        self.row_of: dict[int, int] = {}  # the block that a sequence wrote last -> its row

    def show(self, tables: list[Table], starts: list[int]) -> list[int]:
        """Returns the rows. The first `starts` tokens of each sequence are from earlier steps."""
        if self.is_changing:  # the last change was interrupted
            self.memory.wait()
            self.forget()
        rows = self.choose(tables, starts)
        wanted = dict(zip(rows, tables))
        for row, table in wanted.items():
            read = self.shown[row][: self.num_read[row]]
            if any(old != new for old, new in zip(read, table)):
                self.memory.wait()  # a step in flight may read them
                break
        self.is_changing = True
        for row, table in wanted.items():
            self.change(row, table)
        self.is_changing = False
        self.row_of = {table[-1]: row for row, table in wanted.items()}
        return rows

    def choose(self, tables: list[Table], starts: list[int]) -> list[int]:
        free = dict.fromkeys(range(self.shape.num_rows))  # an ordered set
        rows = []
        for table, start in zip(tables, starts):
            # without earlier tokens, it is the last one of the table, which is not written yet
            last_block = table[(start - 1) // self.shape.block_size]
            row = self.row_of.get(last_block, NEW)
            rows.append(row if row in free else NEW)
            free.pop(row, None)
        begins = {}
        for row in free:
            if self.shown[row]:
                begins[self.shown[row][0]] = row
        for b, table in enumerate(tables):
            if rows[b] == NEW:
                row = begins.get(table[0], NEW)
                if row not in free:
                    row = next(iter(free))
                del free[row]
                rows[b] = row
        return rows

    def change(self, row: int, table: Table) -> None:
        """Maps the blocks that differ. What the row shows behind them is not read."""
        shown = self.shown[row]
        size = self.shape.block_bytes
        first = self.address + row * self.shape.row_blocks * size
        for i, block in enumerate(table):
            if shown[i : i + 1] != [block]:
                self.memory.map(first + i * size, block * size, size)
        self.shown[row] = table + shown[len(table) :]
        self.num_read[row] = len(table)
