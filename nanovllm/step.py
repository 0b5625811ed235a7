"""StepInputs: the tensors of a step, and how its tokens are sampled."""

from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from nanovllm.block_manager import Moves
from nanovllm.layers.batch import Batch
from nanovllm.layers.sampler import SMALL, Sampling
from nanovllm.sequence import Sequence


@dataclass
class StepInputs:
    """T tokens in one flat, ragged batch. S of them need logits."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    batch: Batch
    sampled_rows: Tensor  # [S] int64, which of the T: first those that draw, then those of prompts
    sampling: Sampling | None = None  # how tokens are drawn; None if each is just the likeliest
    moves: Moves = field(default_factory=Moves)  # of blocks, before the model runs
    last_token_ids: Tensor | None = None  # that the last step drew, if some `input_ids` are pending
    logits: Tensor | None = None  # [S, vocab_size], if the recorded step has the head in it

    @property
    def model_inputs(self) -> dict[str, Tensor]:
        """The inputs of the model, by name.

        Only the last one, the block tables, has a length that does not follow from the numbers of
        tokens and sequences.
        """
        ids = {"input_ids": self.input_ids, "positions": self.positions}
        return ids | tensors_of(self.batch)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors. The model's inputs come first, where a CUDA graph expects them."""
        tensors = self.model_inputs
        tensors["sampled_rows"] = self.sampled_rows
        if self.sampling is not None:
            tensors |= tensors_of(self.sampling)
        return tensors

    def fill_in_pending(self) -> None:
        """Replaces each pending token, -2 - row, by the token that the last step drew in this row.
        All is on the device, which may still compute the last step."""
        if self.last_token_ids is None:
            return
        ids = self.input_ids
        rows = (-2 - ids).clamp(min=0)
        drawn = self.last_token_ids[rows]
        drawn = drawn.clamp(min=0)  # not NO_TOKEN, with which the last step fails when it is read
        ids.copy_(drawn.where(ids < 0, ids))

    def to(self, device: torch.device, buffer: Tensor | None = None) -> "StepInputs":
        """The same step on a device, see `move`."""
        moved = move(self.tensors, device, buffer)
        step = with_tensors(self, moved)
        step.batch = with_tensors(self.batch, moved)
        if self.sampling is not None:
            step.sampling = with_tensors(self.sampling, moved)
        return step


class Recorder(Protocol):
    """Computes the steps of some sizes in one launch: CUDA graphs, or a CPU's step in one call."""

    sizes: list[int]  # in sequences, the smallest first

    def record(self, size: int) -> None:
        """Records, or compiles, the step of this size."""

    def size_for(self, step: StepInputs) -> int | None:
        """The size that can compute the step; None if none can."""

    def run(self, step: StepInputs, size: int) -> tuple[Tensor, StepInputs]:
        """Hidden states of a step, and the step as it was computed."""


def sampling_of(seqs: Collection[Sequence], vocab_size: int) -> Sampling:
    """How the next token of each sequence is sampled. A filter that no row uses is None; greedy
    rows use none."""
    params = [seq.request.params for seq in seqs]
    temperature = floats([p.temperature for p in params])
    top_k = integers([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params])
    top_p = floats([p.top_p for p in params])
    min_p = floats([p.min_p for p in params])
    sampling = Sampling(
        temperature=temperature,
        seed=integers([seq.seed for seq in seqs]),
        position=integers([len(seq) for seq in seqs]),
    )
    # a filter counts only where a token is drawn
    is_drawn = temperature > 0
    is_limited = is_drawn & (top_k < vocab_size)
    if is_limited.any():
        sampling.top_k = top_k
        sampling.max_top_k = int(top_k[is_limited].max())
        is_small = is_limited & (top_k <= SMALL)
        sampling.all_top_k_small = bool(is_small.equal(is_drawn))
    if (top_p[is_drawn] < 1).any():
        sampling.top_p = top_p
    if (min_p[is_drawn] > 0).any():
        sampling.min_p = min_p
    return sampling


def tensors_of(part: object) -> dict[str, Tensor]:
    """The tensors of a dataclass, by name. Other fields do not depend on the device."""
    return {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}


def with_tensors(part: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns a copy of `part` with these tensors, as far as it has some with their names."""
    return replace(part, **{name: tensors[name] for name in tensors_of(part) if name in tensors})


def buffer_slices(tensors: dict[str, Tensor]) -> list[slice]:
    """The place of each tensor in a buffer of bytes, one after the other.

    Each place starts at a multiple of 16, because Triton compiles another kernel for unaligned
    pointers.
    """
    parts = []
    begin = 0
    for t in tensors.values():
        parts.append(slice(begin, begin + t.nbytes))
        begin += -(-t.nbytes // 16) * 16
    return parts


def move(
    tensors: dict[str, Tensor], device: torch.device, buffer: Tensor | None = None
) -> dict[str, Tensor]:
    """Moves all tensors in one copy from pinned memory.

    Tensors of the same shapes get the same places in `buffer`.
    """
    parts = buffer_slices(tensors)
    host = torch.empty(parts[-1].stop, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, t in zip(parts, tensors.values()):
        host[part].view(t.dtype).copy_(t.flatten())
    if buffer is None:
        buffer = torch.empty_like(host, device=device)
    buffer[: len(host)].copy_(host, non_blocking=True)
    moved = {}
    for part, (name, t) in zip(parts, tensors.items()):
        moved[name] = buffer[part].view(t.dtype).view(t.shape)
    return moved


def integers(values: Iterable[int]) -> Tensor:
    """[n] int64. Several times faster than torch.tensor(list)."""
    numbers = array("q", values)
    if not numbers:
        return torch.zeros(0, dtype=torch.int64)
    return torch.frombuffer(numbers, dtype=torch.int64)


def floats(values: Iterable[float]) -> Tensor:
    """[n] fp32, n > 0."""
    return torch.frombuffer(array("f", values), dtype=torch.float32)
