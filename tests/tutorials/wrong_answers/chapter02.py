"""Answers to the exercises of chapter 02 that must not pass: exercise, code, a part of what is said."""

PUBLISH = """
class NoDuplicates(BlockManager):
    def publish(self, seq, num_tokens):
        super().publish(seq, num_tokens)
        for i in range(NUM // self.block_size):
            before = seq.prefix_ids[i - 1] if i else EMPTY_PREFIX
            tokens = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
            block = self.findable.get((before, tuple(tokens)))
            own = self.blocks[seq.block_table[i]]
            if block is not None and block is not own:
                seq.block_table[i] = block.id
"""
COUNT_NEW = """
                if block.ref_count == 0:
                    del self.free_blocks[block.id]
                block.ref_count += 1
"""
COUNT_OWN = """
                own.ref_count -= 1
                if own.ref_count == 0:
                    self.free_blocks[own.id] = None
                    self.free_blocks.move_to_end(own.id, last=False)
"""


def publish(*more: str, num: str = "seq.num_computed_tokens") -> str:
    """Code that takes the block that others have, and does this with it and its own."""
    return PUBLISH.replace("NUM", num) + "".join(more)


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
        publish(
            """
                own.ref_count = 0
                self.free_blocks[own.id] = None
"""
        ),
        "AssertionError: block .* is in .* tables, but its ref_count is",
    ),
    "the block that this step fills, too": (
        "02.3",
        publish(COUNT_NEW, COUNT_OWN, num="num_tokens"),
        "4 sequences write into block .* in the same step",
    ),
    "the block may be free": (
        "02.3",
        publish("                block.ref_count += 1", COUNT_OWN),
        "AssertionError",
    ),
}
