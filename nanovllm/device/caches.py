"""Caches: what sequences keep between steps, on the device and on the host."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from nanovllm.block_manager import Moves
from nanovllm.config import Config, Limits
from nanovllm.layers.kv_cache import CacheShape, KVCache
from nanovllm.layers.ops import Ops
from nanovllm.models.dense import DenseModel
from nanovllm.step import move

if TYPE_CHECKING:
    from nanovllm.topics.swapping.host_cache import HostCache

logger = logging.getLogger(__name__)


def choose_shape(
    config: Config, limits: Limits, model: DenseModel, dtype: torch.dtype, device: torch.device
) -> CacheShape:
    """The shape of the KV cache, as model, option and backend want it."""
    shape = model.cache_shape(config.block_size, dtype, limits.max_num_seqs)
    if config.kv_cache_dtype != "auto":
        from nanovllm.topics.quantization.kv_cache import in_int8  # chapter 21

        shape = in_int8(config, shape)
    return model.ops.cache_shape(shape, limits, device)


class Caches:
    """The KV cache on the device, and the blocks of preempted requests on the host."""

    on_device: KVCache
    on_host: HostCache | None = None

    def __init__(
        self, shape: CacheShape, num_blocks: int, num_host_blocks: int, device: torch.device
    ):
        """Raises ValueError if there is not enough memory."""
        try:
            self.on_device = shape.new_cache(num_blocks, device)
            if num_host_blocks:
                from nanovllm.topics.swapping.host_cache import HostCache  # chapter 04

                self.on_host = HostCache(self.on_device, num_host_blocks)
        except (OSError, RuntimeError, OverflowError) as error:
            blocks = f"{num_blocks} KV blocks (num_blocks, kv_cache_gib)"
            host = f"{num_host_blocks} host blocks (swap_gib)"
            what = f"{blocks} and {host} of {shape.block_bytes:,} bytes each"
            if shape.state_bytes:
                what += f", {shape.state_bytes:,} bytes of states (max_num_seqs)"
            reason = getattr(error, "strerror", None) or "not enough memory"
            raise ValueError(f"there is no room for {what}: {reason}") from error

        gib = num_blocks * shape.block_bytes / 2**30
        size = f"{num_blocks:,} blocks of {shape.block_size} tokens, {gib:.1f} GiB"
        if shape.state_bytes:
            gib = shape.state_bytes / 2**30
            size += f"; states of {shape.num_slots:,} sequences, {gib:.1f} GiB"
        logger.info("KV cache: %s", size)

    def move(self, moves: Moves, ops: Ops) -> None:
        """Swaps blocks, then copies states and blocks."""
        if self.on_host is not None:
            self.on_host.swap_out(moves.swaps_out)
            self.on_host.swap_in(moves.swaps_in)
        if moves.state_copies:
            self.on_device.copy_slots(self._moved(moves.state_copies))
        if moves.copies:
            ops.copy_blocks(self.on_device, self._moved(moves.copies))

    def _moved(self, copies: list[tuple[int, int]]) -> torch.Tensor:
        """[n, 2] on the device, for which the host does not wait."""
        return move({"": torch.tensor(copies)}, self.on_device.tensor.device)[""]
