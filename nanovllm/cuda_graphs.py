"""Decode steps recorded as CUDA graphs: one launch in place of some hundred."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch

from nanovllm.scheduler import Schedule

SIZES = [1, 2, 4, 8, *range(16, 513, 16)]
Tensors = dict[str, torch.Tensor]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record, up to the first one that holds `max_num_seqs`; larger batches than 512 run eagerly."""
    return [size for size, smaller in zip(SIZES, [0, *SIZES]) if smaller < max_num_seqs]


def to_device(tensors: Tensors, device: torch.device, buffer: torch.Tensor | None = None) -> Tensors:
    """All of them in one copy from pinned memory. Tensors of the same shapes find the same places in `buffer`.

    Each begins at a multiple of 16 bytes: Triton compiles another kernel for pointers that do not.
    """
    if device.type == "cpu" and buffer is None:
        return tensors
    ends = list(accumulate(-(-t.nbytes // 16) * 16 for t in tensors.values()))
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    places = [slice(begin, begin + t.nbytes) for begin, t in zip([0, *ends], tensors.values())]
    for place, t in zip(places, tensors.values()):
        host[place].view(t.dtype).copy_(t.flatten())
    buffer = torch.empty_like(host, device=device) if buffer is None else buffer
    buffer[: len(host)].copy_(host, non_blocking=True)
    return {name: buffer[place].view(t.dtype).view(t.shape) for place, (name, t) in zip(places, tensors.items())}


def padding(size: int, width: int) -> Tensors:
    """A decode step of `size` rows without a sequence: no slot to write to, no context to read."""
    return {
        "input_ids": torch.zeros(size, dtype=torch.int64),
        "positions": torch.zeros(size, dtype=torch.int64),
        "slot_mapping": torch.full((size,), -1),
        "cu_seqlens_q": torch.arange(size + 1, dtype=torch.int32),
        "context_lens": torch.zeros(size, dtype=torch.int32),
        "block_tables": torch.zeros(size, width, dtype=torch.int32),
    }


class DecodeGraphs:
    """`forward`, recorded for several numbers of rows. All graphs read their inputs from one buffer.

    A graph replays the same kernels with the same arguments at the same addresses. So inputs are copied to where the
    recording found them, rows that are not needed are padding, and block tables have `width` columns, always.
    Without CUDA everything is the same, but for recording and replay, which are a plain call.
    """

    def __init__(self, forward: Callable[[Tensors], torch.Tensor], max_num_seqs: int, width: int, device: torch.device):
        self.forward, self.width, self.device = forward, width, device
        self.sizes = graph_sizes(max_num_seqs)
        room = 128 + 64 * self.sizes[-1]  # the parameters of sampling travel behind the inputs of the graph
        num_bytes = sum(t.nbytes + 16 for t in padding(self.sizes[-1], width).values()) + room
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.steps: dict[int, Callable[[], torch.Tensor]] = {}
        self.pool = None

    @torch.inference_mode()
    def record(self, size: int) -> None:
        """Largest size first: the smaller ones then fit into the memory that the largest has taken."""
        step = partial(self.forward, to_device(padding(size, self.width), self.device, self.buffer))
        self.steps[size] = step if self.device.type == "cpu" else self._captured(step)

    def _captured(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        step()  # compiles what is not compiled yet, which cannot happen during a recording
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            hidden = step()
        self.pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return hidden

        return replay

    def size_for(self, schedule: Schedule) -> int | None:
        """Rows of the smallest graph that can compute the step; None if it is no decode, or too large."""
        rows = len(schedule.items)
        return next((size for size in self.sizes if size >= rows), None) if schedule.num_tokens == rows else None

    def padded(self, inputs: Tensors, size: int) -> Tensors:
        """A step's inputs with the shapes of a recording; what a recording does not know is left as it is."""
        rows = padding(size, self.width)
        for name, place in rows.items():
            values = inputs[name][tuple(map(slice, place.shape))]  # no context reaches the end of a longer block table
            place[tuple(map(slice, values.shape))] = values
        return inputs | rows
