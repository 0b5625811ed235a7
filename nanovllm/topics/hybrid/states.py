"""States: the memory of the layers that have no KV cache. Each running sequence has one slot.

A slot is like a block: a fork shares it, and the first of its owners that writes copies it. It is
unlike a block: it cannot be cut. It holds what is left of all computed tokens of its sequence, and
nothing of fewer tokens can be had from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanovllm.block_manager import BlockManager
from nanovllm.config import Config, Limits
from nanovllm.sequence import Sequence
from nanovllm.topics.hybrid.delta import state_shapes

logger = logging.getLogger(__name__)

LARGEST_SHARE = 0.5  # of the memory for caches: at most so much is for states


class StateBlocks(BlockManager):
    """A block manager that also hands out slots. There are as many as sequences can run, so none is
    ever missing. No prefix is shared: with its blocks, a sequence would need the state behind
    them."""

    def __init__(self, *args: Any, num_slots: int):
        super().__init__(*args)
        self.enable_prefix_caching = False
        self.free_slots = [*range(num_slots, 0, -1)]
        self.slot_owners = [0] * (num_slots + 1)

    def allocate(self, seq: Sequence, num_tokens: int) -> None:
        """Gives `seq` its blocks, and a slot that only this sequence has: the step writes it."""
        super().allocate(seq, num_tokens)
        shared = seq.state_slot
        if self.slot_owners[shared] == 1:
            return
        seq.state_slot = self.free_slots.pop()
        self.slot_owners[seq.state_slot] = 1
        if shared:
            self.slot_owners[shared] -= 1
            self.moves.state_copies.append((shared, seq.state_slot))

    def free(self, seq: Sequence) -> None:
        super().free(seq)
        slot = seq.state_slot
        seq.state_slot = 0
        if slot:
            self.slot_owners[slot] -= 1
            if self.slot_owners[slot] == 0:
                self.free_slots.append(slot)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> None:
        """Lets `child` share all that `parent` has computed. A part cannot be shared: the child
        then computes its tokens itself."""
        if num_tokens not in (None, parent.num_computed_tokens):
            return
        super().fork(parent, child, num_tokens)
        if child.num_computed_tokens:
            child.state_slot = parent.state_slot
            self.slot_owners[child.state_slot] += 1


# --- an engine with states ---


def with_slots(
    config: Config, limits: Limits, hf_config, path: Path, device: torch.device
) -> tuple[Limits, Callable[..., StateBlocks]]:
    """The limits of an engine whose sequences have states, and what makes its block manager. Raises
    ValueError for an option that a state makes impossible."""
    why = "with this model, whose layers have states"
    allowed = {
        "preemption_mode": ("recompute",),
        "speculative_config": (None,),
        "attention_backend": ("auto", "torch", "numba", "triton"),
    }
    for name, values in allowed.items():
        names = " or ".join(map(repr, values))
        config.require(name, getattr(config, name) in values, f"{names} {why}")
    manager_cls = config.block_manager_cls or StateBlocks
    is_allowed = issubclass(manager_cls, StateBlocks)
    config.require("block_manager_cls", is_allowed, f"a subclass of StateBlocks {why}")
    if config.enable_prefix_caching:
        logger.info("Prefix caching is off: a prefix would need the state behind its last token")
    num_slots = min(limits.max_num_seqs, slots_that_fit(config, hf_config, path, device))
    if num_slots < limits.max_num_seqs:
        share = f"{LARGEST_SHARE:.0%} of the memory for caches"
        logger.info("max_num_seqs is %s: the states of more do not fit into %s", num_slots, share)
    limits = replace(limits, max_num_seqs=num_slots)
    return limits, partial(manager_cls, num_slots=num_slots)


def slots_that_fit(config: Config, hf_config, path: Path, device: torch.device) -> int:
    """The number of sequences whose states fit into their share of the memory for caches. On a GPU,
    that is what the weights leave, by their files. Raises ValueError if there is room for none."""
    num_ranks = config.tensor_parallel_size
    numbers = sum(torch.Size(shape).numel() for shape in state_shapes(hf_config))
    slot_bytes = 4 * numbers * hf_config.layer_types.count("linear_attention") // num_ranks
    room = int(config.kv_cache_gib * 2**30)
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        room = int(total * config.gpu_memory_utilization) - weights // num_ranks
    num_slots = int(room * LARGEST_SHARE) // slot_bytes - 1  # one is for padding
    if num_slots < 1:
        needed = f"kv_cache_gib or gpu_memory_utilization leaves {room:,} bytes"
        share = f"at most {LARGEST_SHARE:.0%} of them are for states"
        raise ValueError(
            f"no memory is left for a state of {slot_bytes:,} bytes: {needed}; {share}"
        )
    return num_slots
