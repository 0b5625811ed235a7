"""Your answers to the exercises of chapter 02. To check them: python -m tutorials.check 02"""

from nanovllm.block_manager import EMPTY_PREFIX, BlockManager


# --- 02.1 ---
def hits(n: int) -> int:
    """How many tokens of a prompt of n tokens hit, if the same prompt was computed and freed
    before. Blocks have 16 tokens."""
    raise NotImplementedError


# --- 02.2 ---
class MostRecent(BlockManager):
    """Takes blocks that cannot be found first. If all can be found, it takes the one that was
    freed last."""

    def take_block(self):
        """Returns a free `Block`. Leaves it as `BlockManager.take_block` does."""
        raise NotImplementedError


# --- 02.3 ---
class NoDuplicates(BlockManager):
    """Gives a full block back if another block holds the same prefix."""

    def cache_full_blocks(self, seq, num_tokens):
        raise NotImplementedError
