"""Machines: how long a step takes, from its bytes and FLOPs. Imports no torch.

A step is made of parts, one after the other: the host's work, launches, the products with the
weights, attention, moves of blocks, and what several ranks send each other. Products and attention
both read and compute. A kernel does the two partly at the same time: `overlap` says how much of the
shorter one is hidden behind the longer one.

    overlap 0: reading + computing            overlap 1: the larger of the two

The GPUs were not measured. Their hardware is that of data sheets, the host's work was measured
without a GPU, all else is assumed: see `Machine.sources`. The CPU was measured:
`tutorials/15_believe.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from nanovllm.topics.simulator.cost_model import (
    HARDWARE,
    LINKS,
    Hardware,
    Items,
    Link,
    Shape,
    Work,
    work_of,
)

HOST = "measured without a GPU: tutorials/results/cpu_host.json"


@dataclass(frozen=True)
class Machine:
    """Hardware as it is in use: kernels reach a part of each ceiling, and every step has work
    beside them. Times are in seconds."""

    hardware: Hardware
    bandwidth_share: float = 0.8  # of products: reading the weights
    flops_share: float = 0.6
    attention_bandwidth_share: float = 0.8  # reading keys and values
    attention_flops_share: float = 0.6
    overlap: float = 1.0
    # the host: scheduling, preparing, delivering
    seconds_per_step: float = 2.7e-4
    seconds_per_sequence: float = 3.9e-6
    seconds_per_token: float = 0.0
    # launches
    seconds_per_layer: float = 1e-5  # ten kernels at most (chapter 11), a microsecond each
    seconds_per_chunk: float = 0.0  # in each layer, where attention computes chunks one by one
    host_bytes_per_second: float = 25e9  # to the host's memory and back: PCIe 4.0 with 16 lanes
    link: Link = LINKS["nvlink"]  # to the other devices of a replica
    slowness: float = 1.0  # times the sum of all parts
    # where the numbers come from; a field that is not here is assumed
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def seconds(
        self,
        shape: Shape,
        items: Items,
        num_sampled: int,
        num_copies: int,
        num_swaps: int,
        block_size: int,
        num_ranks: int = 1,
    ) -> float:
        """What a step takes that computes `items`, draws `num_sampled` tokens, copies `num_copies`
        blocks of `block_size` tokens, and swaps `num_swaps` of them out or in. The shape is that of
        one of `num_ranks`."""
        parts = (
            self.host_seconds(items)
            + self.launch_seconds(shape, items)
            + self.compute_seconds(shape, items, num_sampled)
            + self.copy_seconds(shape, num_copies, block_size)
            + self.swap_seconds(shape, num_swaps, block_size)
            + self.link_seconds(shape, items, num_sampled, num_ranks)
        )
        return self.slowness * parts

    def slower(self, factor: float) -> Machine:
        """A machine on which every step takes `factor` times as long; below 1, it is faster."""
        return replace(self, slowness=factor * self.slowness)

    def host_seconds(self, items: Items) -> float:
        num_tokens = sum(num_tokens for num_tokens, _ in items)
        of_sequences = self.seconds_per_sequence * len(items)
        return self.seconds_per_step + of_sequences + self.seconds_per_token * num_tokens

    def launch_seconds(self, shape: Shape, items: Items) -> float:
        num_chunks = sum(num_tokens > 1 for num_tokens, _ in items)
        return shape.layers * (self.seconds_per_layer + self.seconds_per_chunk * num_chunks)

    def compute_seconds(self, shape: Shape, items: Items, num_sampled: int) -> float:
        """Products, then attention."""
        weights, products, keys, scores = self.parts(work_of(shape, items, num_sampled))
        return self.together(weights, products) + self.together(keys, scores)

    def parts(self, work: Work) -> tuple[float, float, float, float]:
        """Seconds of four parts, each by itself: reading the weights, products with them, reading
        keys and values, computing with them."""
        bandwidth, rate = self.hardware.bytes_per_second, self.hardware.flops_per_second
        return (
            work.weight_bytes / (bandwidth * self.bandwidth_share),
            (work.flops - work.attention_flops) / (rate * self.flops_share),
            work.kv_bytes / (bandwidth * self.attention_bandwidth_share),
            work.attention_flops / (rate * self.attention_flops_share),
        )

    def together(self, reading: float, computing: float) -> float:
        """The longer one, and what is not hidden of the shorter one."""
        return max(reading, computing) + (1 - self.overlap) * min(reading, computing)

    def copy_seconds(self, shape: Shape, num_copies: int, block_size: int) -> float:
        num_bytes = 2 * num_copies * block_size * shape.kv_bytes  # read and written
        return num_bytes / (self.hardware.bytes_per_second * self.bandwidth_share)

    def swap_seconds(self, shape: Shape, num_swaps: int, block_size: int) -> float:
        return num_swaps * block_size * shape.kv_bytes / self.host_bytes_per_second

    def link_seconds(self, shape: Shape, items: Items, num_sampled: int, num_ranks: int) -> float:
        """All-reduces of a number per token and hidden size, two per layer and one for the
        embedding; then the first rank gathers the logits (chapter 18)."""
        if num_ranks == 1:
            return 0.0
        num_bytes = sum(num_tokens for num_tokens, _ in items) * shape.hidden * shape.itemsize
        adding = (2 * shape.layers + 1) * self.link.all_reduce(num_bytes, num_ranks)
        return adding + self.link.gather(num_sampled * shape.vocab * shape.itemsize, num_ranks)


MACHINES = {
    name: Machine(
        hardware,
        sources={
            "hardware": hardware.source,
            "seconds_per_step": HOST,
            "seconds_per_sequence": HOST,
        },
    )
    for name, hardware in HARDWARE.items()
}
# one thread, the embedded model in float32: tutorials/results/machines_cpu.json
EPYC = Hardware("AMD EPYC, one thread", 37.6e9, 109e9, 25.3e9, "measured: machines_cpu.json")
MACHINES["cpu"] = Machine(
    EPYC,
    bandwidth_share=0.627,
    flops_share=1.164,  # in its own products: square ones are slower
    attention_bandwidth_share=0.144,
    attention_flops_share=0.543,
    overlap=0.0,
    seconds_per_step=9.15e-4,
    seconds_per_sequence=2.4e-5,
    seconds_per_layer=0.0,
    seconds_per_chunk=7.5e-5,
    host_bytes_per_second=12.2e9,
    sources={"hardware": EPYC.source},
)
