"""Tiers: a prefix cache that goes on in host memory, when blocks are evicted from the device. No
torch here.

Each tier is a BlockManager with the same rules: a block that no sequence owns stays cached until it
is handed out again, least recently used first. So blocks of preempted requests, which have owners,
push cached ones out of the host, never the other way round. A block that comes back stays on the
host, too: if the device evicts it again, nothing is copied.
"""

from typing import Any

from nanovllm.block_manager import Block, BlockManager
from nanovllm.options import refusal
from nanovllm.topics.swapping.blocks import copy_out, host_of


class TwoTiers(BlockManager):
    """A block manager that keeps evicted blocks on the host. `bring_back` finds them there."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self.host is None:  # of a user's class, which passes no number on
            raise refusal("swap_prefixes", True, f"{type(self).__name__} has no host blocks")
        self.host.enable_prefix_caching = True

    def take_block(self) -> Block:
        """Before the step overwrites the block, its content goes to the host if it was cached."""
        if self.free_blocks:
            self._keep(self.blocks[next(iter(self.free_blocks))])
        return super().take_block()

    def _keep(self, block: Block) -> None:
        """Copies a cached block to the host, unless the host has it, or preempted requests fill the
        host."""
        host = host_of(self)
        if block.key and host.free_blocks:
            twin = copy_out(self, block)
            host.release_blocks([twin.id])

    def new_prefix_id(self, key: Any) -> int:
        """On the host, the prefix may have an identity already: blocks behind it stay in reach."""
        twin = host_of(self).cached_blocks.get(key)
        return super().new_prefix_id(key) if twin is None else twin.prefix_id

    def forget_prefixes(self) -> None:
        """Empties the prefix cache in both tiers."""
        super().forget_prefixes()
        host_of(self).forget_prefixes()


def two_tiers(manager_cls: Any) -> type[BlockManager]:
    """The class with two tiers; with a user's class, a subclass of both. The user's methods come
    first."""
    if manager_cls is BlockManager:
        return TwoTiers
    return type(
        manager_cls.__name__, (manager_cls, TwoTiers), {"__module__": manager_cls.__module__}
    )
