"""Answers to the exercises of chapter 02 that must not pass: exercise, code, a part of what is said."""

WRONG = {
    "all full blocks hit": ("02.1", "def hits(n): return n // 16 * 16", r"of 16 tokens 0 hit"),
    "single tokens hit": ("02.1", "def hits(n): return n - 1", "of 2 tokens 0 hit"),
    "least recent": (
        "02.2",
        "class MostRecent(BlockManager): pass",
        "0 of 180 requests hit",
    ),
    "keys first": (
        "02.2",
        """
class MostRecent(BlockManager):
    def take_block(self):
        self.free_blocks.move_to_end(next(reversed(self.free_blocks)), last=False)
        return super().take_block()
""",
        "0 of 180 requests hit",
    ),
    "it does nothing": ("02.3", "class NoDuplicates(BlockManager): pass", "24 blocks were in use"),
    "the new owner is not counted": (
        "02.3",
        """
class NoDuplicates(BlockManager):
    def publish(self, seq, num_tokens):
        super().publish(seq, num_tokens)
        for i in range(seq.num_computed_tokens // self.block_size):
            before = seq.prefix_ids[i - 1] if i else EMPTY_PREFIX
            tokens = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
            block = self.findable.get((before, tuple(tokens)))
            own = self.blocks[seq.block_table[i]]
            if block is not None and block is not own:
                seq.block_table[i] = block.id
                own.ref_count = 0
                self.free_blocks[own.id] = None
""",
        "AssertionError: block .* is in .* tables, but its ref_count is",
    ),
    "the block that this step fills, too": (
        "02.3",
        """
class NoDuplicates(BlockManager):
    def publish(self, seq, num_tokens):
        super().publish(seq, num_tokens)
        for i in range(num_tokens // self.block_size):
            before = seq.prefix_ids[i - 1] if i else EMPTY_PREFIX
            tokens = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
            block = self.findable.get((before, tuple(tokens)))
            own = self.blocks[seq.block_table[i]]
            if block is not None and block is not own:
                if block.ref_count == 0:
                    del self.free_blocks[block.id]
                block.ref_count += 1
                seq.block_table[i] = block.id
                own.ref_count -= 1
                if own.ref_count == 0:
                    self.free_blocks[own.id] = None
                    self.free_blocks.move_to_end(own.id, last=False)
""",
        "4 sequences write into block .* in the same step",
    ),
    "the block may be free": (
        "02.3",
        """
class NoDuplicates(BlockManager):
    def publish(self, seq, num_tokens):
        super().publish(seq, num_tokens)
        for i in range(seq.num_computed_tokens // self.block_size):
            before = seq.prefix_ids[i - 1] if i else EMPTY_PREFIX
            tokens = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
            block = self.findable.get((before, tuple(tokens)))
            own = self.blocks[seq.block_table[i]]
            if block is not None and block is not own:
                block.ref_count += 1
                seq.block_table[i] = block.id
                own.ref_count -= 1
                if own.ref_count == 0:
                    self.free_blocks[own.id] = None
                    self.free_blocks.move_to_end(own.id, last=False)
""",
        "AssertionError",
    ),
}
