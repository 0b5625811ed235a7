"""The cost model: the bytes and FLOPs of a step, and the least time that a machine needs for them.

Plain numbers; imports no torch. The benchmark and chapters 00 and 10 share it. The floor of a step is the larger of two
times: its bytes divided by the memory bandwidth, and its FLOPs divided by the rate of arithmetic. Bytes are the weights
once, the keys and values of every context once, and those of new tokens; FLOPs are those of the matrix products. The
floor leaves out activations, softmax, sampling and kernel launches. It also ignores that small products do not reach
the rate of large ones, and that reading and computing overlap imperfectly. A block that sequences share counts for each
of them. Only data that fits into a processor's cache can beat the floor.
"""

from collections.abc import Mapping
from typing import NamedTuple

FIELDS = (  # as they are spelled in Hugging Face's config.json
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "tie_word_embeddings vocab_size max_position_embeddings"
)
SHAPES = {  # of real models
    name: dict(zip(FIELDS.split(), values))
    for name, *values in (
        ("qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, True, 151936, 40960),
        ("qwen3-1.7b", "qwen3", 2048, 6144, 28, 16, 8, 128, True, 151936, 40960),
        ("qwen3-4b", "qwen3", 2560, 9728, 36, 32, 8, 128, True, 151936, 40960),
        ("qwen3-8b", "qwen3", 4096, 12288, 36, 32, 8, 128, False, 151936, 40960),
        ("qwen2.5-7b", "qwen2", 3584, 18944, 28, 28, 4, 128, False, 152064, 32768),
    )
}


class Shape(NamedTuple):
    """What the cost of a model depends on. All fields are counts, except `itemsize`, which is in bytes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    body: int  # parameters without the embedding and the head
    itemsize: int  # bytes per weight, and per number in the KV cache
    tied: bool = True  # the head and the embedding are the same matrix

    @property
    def head(self) -> int:
        """Parameters of the output head."""
        return self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's key and value in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes that all weights take in memory."""
        return (self.body + (1 if self.tied else 2) * self.head) * self.itemsize


class Step(NamedTuple):
    """One step that the engine ran."""

    items: list[
        tuple[int, int]
    ]  # per sequence: tokens computed, and tokens in its context afterwards
    sampled: int  # number of sequences that drew a token
    seconds: float = 0.0  # the whole step
    host_seconds: float = 0.0  # the part of it that Python spent on preparing and delivering

    @property
    def kind(self) -> str:
        """decode: every sequence computed one token. prefill: any other step."""
        return "decode" if all(n == 1 for n, _ in self.items) else "prefill"


class Work(NamedTuple):
    """The minimum that a step must move, in bytes, and compute, in FLOPs."""

    weight_bytes: int
    kv_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes


class Hardware(NamedTuple):
    """A machine: its two ceilings, and the size of its memory."""

    name: str
    bytes_per_second: float
    flops_per_second: float  # dense, in the model's type
    memory_bytes: float
    source: str = "measured"

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic is the limit."""
        return self.flops_per_second / self.bytes_per_second

    def floor(self, work: Work) -> float:
        """Seconds that no implementation can beat."""
        return max(work.bytes / self.bytes_per_second, work.flops / self.flops_per_second)


# bfloat16 without sparsity: the data sheets of H100 and H200 give twice these FLOP/s, "with sparsity". 1 GB: 10^9 bytes
HARDWARE = {
    "h100": Hardware("H100 SXM", 3.35e12, 989e12, 80e9, "NVIDIA H100 Tensor Core GPU, data sheet"),
    "h200": Hardware("H200 SXM", 4.8e12, 989e12, 141e9, "NVIDIA H200 Tensor Core GPU, data sheet"),
    "a100": Hardware(
        "A100 80 GB SXM", 2.039e12, 312e12, 80e9, "NVIDIA A100 Tensor Core GPU, data sheet"
    ),
    # products are accumulated in float32; float16 with float16 accumulation is twice as fast
    "rtx4090": Hardware(
        "RTX 4090", 1.008e12, 165.2e12, 24e9, "NVIDIA Ada GPU Architecture, white paper, appendix A"
    ),
}


def shape_of(config, itemsize: int) -> Shape:
    """The shape of a Qwen2 or Qwen3 model from its Hugging Face config, a dict or an object; `itemsize` in bytes."""
    config = config if isinstance(config, Mapping) else config.to_dict()
    hidden, heads, kv_heads = (
        config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim, is_qwen3 = config.get("head_dim") or hidden // heads, config["model_type"] == "qwen3"
    qkv = (heads + 2 * kv_heads) * head_dim
    layer = (
        hidden * qkv
        + heads * head_dim * hidden
        + 3 * hidden * config["intermediate_size"]
        + 2 * hidden
    )
    layer += 2 * head_dim if is_qwen3 else qkv  # the norms of q and k, or the biases
    layers, vocab, tied = (
        config["num_hidden_layers"],
        config["vocab_size"],
        config.get("tie_word_embeddings", False),
    )
    return Shape(
        layers, hidden, heads, kv_heads, head_dim, vocab, layers * layer + hidden, itemsize, tied
    )


def visible_keys(tokens: int, context: int) -> int:
    """How many keys the last `tokens` tokens of a context see in total."""
    return tokens * (2 * context - tokens + 1) // 2


def work_of(shape: Shape, items: list[tuple[int, int]], sampled: int) -> Work:
    """The work of a step that computes `items` (see Step) and draws tokens for `sampled` sequences."""
    tokens, contexts = sum(n for n, _ in items), sum(context for _, context in items)
    weights = (
        shape.body + tokens * shape.hidden + (shape.head if sampled else 0)
    )  # only some rows of the embedding
    attention = (
        4 * shape.layers * shape.heads * shape.head_dim * sum(visible_keys(*item) for item in items)
    )
    flops = 2 * shape.body * tokens + 2 * shape.head * sampled + attention
    return Work(
        weights * shape.itemsize, (contexts + tokens) * shape.kv_bytes, flops
    )  # KV: read and written


def roofline(shape: Shape, steps: list[Step], hardware: Hardware) -> dict[str, dict]:
    """For decode steps and for prefill steps: the seconds they took, and the shares of the floor and of the host."""
    report = {}
    for kind in ("decode", "prefill"):
        chosen = [step for step in steps if step.kind == kind]
        floor = sum(hardware.floor(work_of(shape, step.items, step.sampled)) for step in chosen)
        seconds, host = (
            sum(step.seconds for step in chosen),
            sum(step.host_seconds for step in chosen),
        )
        shares = {"floor_share": floor / seconds, "host_share": host / seconds} if chosen else {}
        report[kind] = {"steps": len(chosen), "seconds": seconds, "floor_seconds": floor, **shares}
    return report


BIN = ("sequences", "steps", "tokens", "bytes", "flops", "seconds", "host_seconds")


def binned(shape: Shape, steps: list[Step]) -> dict[str, list[list]]:
    """A summary of the steps of each kind: a row of `BIN` for each number of sequences, summed over its steps."""
    bins: dict[str, dict[int, list]] = {"decode": {}, "prefill": {}}
    for step in steps:
        work = work_of(shape, step.items, step.sampled)
        row = [
            1,
            sum(n for n, _ in step.items),
            work.bytes,
            work.flops,
            step.seconds,
            step.host_seconds,
        ]
        sums = bins[step.kind].setdefault(len(step.items), [0] * len(row))
        sums[:] = map(sum, zip(sums, row))
    return {kind: [[size, *rows[size]] for size in sorted(rows)] for kind, rows in bins.items()}
