"""The cost model: the bytes and FLOPs of a step, and the least time that a machine needs for them.

Plain numbers; imports no torch. The benchmark, the simulator and chapters 00 and 12 share it. How
long a step really takes is guessed in `machines.py`; this is its floor, the larger of two times:
its bytes divided by the memory bandwidth, and its FLOPs divided by the rate of arithmetic. Bytes
are the weights once, the keys and values of every context once, and those of new tokens; FLOPs are
those of the matrix products. Of experts, only those count that are hit: see `Shape.hit`. The floor
leaves out activations, softmax, sampling and kernel launches. It also ignores that small products
do not reach the rate of large ones, and that reading and computing overlap imperfectly. A block
that sequences share counts for each of them. Only data that fits into a processor's cache can beat
the floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nanovllm.topics.parallel.heads import check_heads

Items = Sequence[tuple[int, int]]
"""Per sequence of a step: tokens computed, and tokens in its context afterwards."""

FIELDS = (  # as they are spelled in Hugging Face's config.json
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim tie_word_embeddings vocab_size max_position_embeddings"
)
SHAPES = {  # of real models
    name: dict(zip(FIELDS.split(), values))
    for name, *values in (
        ("qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, True, 151936, 40960),
        ("qwen3-1.7b", "qwen3", 2048, 6144, 28, 16, 8, 128, True, 151936, 40960),
        ("qwen3-4b", "qwen3", 2560, 9728, 36, 32, 8, 128, True, 151936, 40960),
        ("qwen3-8b", "qwen3", 4096, 12288, 36, 32, 8, 128, False, 151936, 40960),
        ("qwen3-14b", "qwen3", 5120, 17408, 40, 40, 8, 128, False, 151936, 40960),
        ("qwen3-32b", "qwen3", 5120, 25600, 64, 64, 8, 128, False, 151936, 40960),
        ("qwen2.5-7b", "qwen2", 3584, 18944, 28, 28, 4, 128, False, 152064, 32768),
        ("qwen3-30b-a3b", "qwen3_moe", 2048, 6144, 48, 32, 4, 128, False, 151936, 40960),
        ("smollm2-135m", "llama", 576, 1536, 30, 9, 3, 64, True, 49152, 8192),
    )
}
SHAPES["qwen3-30b-a3b"] |= dict(
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
)  # fmt: skip


class Shape(NamedTuple):
    """What the cost of a model depends on. All fields are counts, except `itemsize`: bytes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    body: int  # parameters without the embedding and the head
    itemsize: int  # bytes per weight, and per number in the KV cache
    tied: bool = True  # the head and the embedding are the same matrix
    experts: int = 0  # of a layer that has any
    top: int = 0  # experts of a token
    expert: int = 0  # parameters of one expert, in all layers together

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
        num_tables = 1 if self.tied else 2
        return (self.body + num_tables * self.head) * self.itemsize

    def hit(self, tokens: int) -> float:
        """The experts of a layer that a step with `tokens` tokens hits, on average. Each token
        chooses by itself, and no expert is chosen more often than another one."""
        if not self.experts:
            return 0.0
        missed = (1 - self.top / self.experts) ** tokens
        return self.experts * (1 - missed)

    def shard(self, num_ranks: int) -> Shape:
        """What one of several ranks has, in tensor parallelism. Raises ValueError."""
        check_heads(num_ranks, self.heads, self.kv_heads)
        return self._replace(
            heads=self.heads // num_ranks,
            kv_heads=max(1, self.kv_heads // num_ranks),
            vocab=-(-self.vocab // num_ranks),
            body=-(-self.body // num_ranks),
            expert=-(-self.expert // num_ranks),
        )


class Work(NamedTuple):
    """The minimum that a step must move, in bytes, and compute, in FLOPs."""

    weight_bytes: int
    kv_bytes: int
    flops: int
    attention_flops: int = 0  # of the FLOPs, those of attention; the others are of products

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


class Hardware(NamedTuple):
    """A machine: its two ceilings, and the size of its memory."""

    name: str
    bytes_per_second: float
    flops_per_second: float  # dense, in the model's type
    memory_bytes: float
    source: str = "measured"

    def floor(self, work: Work) -> float:
        """Seconds that no implementation can beat."""
        return max(work.bytes / self.bytes_per_second, work.flops / self.flops_per_second)


# bfloat16 without sparsity: the data sheets of H100 and H200 give twice these FLOP/s, "with
# sparsity". 1 GB: 10^9 bytes
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


class Link(NamedTuple):
    """What connects the devices of tensor parallelism: each sends to the next one in a ring."""

    name: str
    bytes_per_second: float  # in one direction
    seconds_per_hop: float
    source: str
    seconds_per_call: float = 6.6e-6

    def all_reduce(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds until all have the sum. Each part of it goes around twice: once to be added up,
        once to be known."""
        num_hops = 2 * (num_ranks - 1)
        sending = num_hops / num_ranks * num_bytes / self.bytes_per_second
        return self.seconds_per_call + num_hops * self.seconds_per_hop + sending

    def gather(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds until the first rank has `num_bytes` from each rank. It takes them one
        after the other."""
        sending = (num_ranks - 1) * num_bytes / self.bytes_per_second
        return self.seconds_per_call + self.seconds_per_hop + sending


# the latencies are those by which NCCL plans (src/graph/tuning.cc: ring, protocol LL)
LINKS = {
    "nvlink": Link("NVLink 4", 450e9, 0.6e-6, "NVIDIA H100 Tensor Core GPU, data sheet"),
    "pcie": Link("PCIe 5.0 x16", 64e9, 1.0e-6, "NVIDIA H100 Tensor Core GPU, data sheet"),
    "network": Link("400 Gb/s network", 50e9, 2.7e-6, "NVIDIA ConnectX-7, data sheet"),
}


# --- the work of a step ---


def shape_of(config, itemsize: int) -> Shape:
    """The shape of a Qwen (dense or with experts) or Llama model from its Hugging Face config, a
    dict or an object; `itemsize` in bytes."""
    config = config if isinstance(config, Mapping) else config.to_dict()
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    layers = config["num_hidden_layers"]
    qkv = (heads + 2 * kv_heads) * head_dim
    attention = hidden * qkv + heads * head_dim * hidden
    norms = {"qwen3": 2 * head_dim, "qwen3_moe": 2 * head_dim, "qwen2": qkv}  # or biases
    attention += norms.get(config["model_type"], 0)
    mlp = 3 * hidden * config["intermediate_size"]
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    every = config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    sparse = []
    if experts:
        sparse = [i for i in range(every - 1, layers, every) if i not in dense]
    expert = 3 * hidden * config.get("moe_intermediate_size", 0)
    mlps = (layers - len(sparse)) * mlp
    mlps += len(sparse) * experts * (expert + hidden)  # and a router
    norms = 2 * hidden
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config["vocab_size"],
        body=layers * (attention + norms) + mlps + hidden,
        itemsize=itemsize,
        tied=config.get("tie_word_embeddings", False),
        experts=experts,
        top=config.get("num_experts_per_tok", 0),
        expert=len(sparse) * expert,
    )


def visible_keys(tokens: int, context: int) -> int:
    """How many keys the last `tokens` tokens of a context see in total."""
    return tokens * (2 * context - tokens + 1) // 2


def work_of(shape: Shape, items: Items, sampled: int) -> Work:
    """The work of a step that computes `items` and draws tokens for `sampled` sequences."""
    tokens = sum(num_tokens for num_tokens, _ in items)
    contexts = sum(context for _, context in items)
    rest = shape.body - shape.experts * shape.expert
    weights = rest + round(shape.hit(tokens) * shape.expert)
    weights += tokens * shape.hidden  # only some rows of the embedding
    if sampled:
        weights += shape.head
    num_keys = sum(visible_keys(*item) for item in items)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * num_keys
    return Work(
        weight_bytes=weights * shape.itemsize,
        kv_bytes=(contexts + tokens) * shape.kv_bytes,  # read and written
        flops=2 * (rest + shape.top * shape.expert) * tokens + 2 * shape.head * sampled + attention,
        attention_flops=attention,
    )
