"""StepInputs: what the device must know about a step."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nanovllm.layers.batch import Batch
from nanovllm.layers.sampler import Sampling


@dataclass
class StepInputs:
    """T tokens in one flat, ragged batch. S of them need logits, because a next token is drawn after them."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    batch: Batch
    sampled_rows: Tensor  # [S] int64, which of the T
    sampling: Sampling | None = None  # how the S tokens are drawn; None if all are greedy

    @property
    def model_inputs(self) -> list[Tensor]:
        """Only the last one, the block tables, has a length that does not follow from the number of tokens and sequences."""
        b = self.batch
        per_query = [self.input_ids, self.positions, b.slot_mapping, b.cu_seqlens_q]
        return [*per_query, b.context_lens, b.cu_blocks, b.block_tables]

    def to(self, device: torch.device, buffer: Tensor | None = None) -> "StepInputs":
        """The same step on a device, see `move`. The model's inputs come first, at the addresses a CUDA graph expects."""
        options = [] if self.sampling is None else self.sampling.tensors
        moved = move([*self.model_inputs, self.sampled_rows, *options], device, buffer)
        input_ids, positions, slots, starts, contexts, cu_blocks, tables, rows, *options = moved
        b = self.batch
        batch = Batch(
            b.kv_cache, slots, starts, contexts, cu_blocks, tables, b.num_decodes, b.max_context
        )
        return StepInputs(
            input_ids, positions, batch, rows, self.sampling and self.sampling.with_tensors(options)
        )


def move(tensors: list[Tensor], device: torch.device, buffer: Tensor | None = None) -> list[Tensor]:
    """Moves all tensors in one copy from pinned memory. Tensors of the same shapes get the same places in `buffer`.

    Each starts at a multiple of 16 bytes, because Triton compiles another kernel for unaligned pointers.
    """
    ends = list(accumulate(-(-t.nbytes // 16) * 16 for t in tensors))
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    parts = [slice(begin, begin + t.nbytes) for begin, t in zip([0, *ends], tensors)]
    for part, t in zip(parts, tensors):
        host[part].view(t.dtype).copy_(t.flatten())
    buffer = torch.empty_like(host, device=device) if buffer is None else buffer
    buffer[: len(host)].copy_(host, non_blocking=True)
    return [buffer[part].view(t.dtype).view(t.shape) for part, t in zip(parts, tensors)]
