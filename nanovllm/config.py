"""Config: every option of the engine, with its default and its limits. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from re import fullmatch
from typing import ClassVar, Literal

from nanovllm.options import ABOVE_0, SEED, Options, Rule, integer, number

EMBEDDED_MODEL = str(Path(__file__).parent / "tiny_qwen3")
LARGEST = 2**31 - 1
TOKENS_PER_STEP = {"cuda": 8192, "cpu": 384}  # the default of max_num_batched_tokens


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What follows from a Config for one model on one device. The scheduler keeps within them."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_drafts: int = 0  # draft tokens of a sequence in a step, at most

    def num_useful_blocks(self, block_size: int) -> int:
        """The number of KV blocks that the sequences of a step can fill; more are of no use."""
        return self.max_num_seqs * -(-self.max_model_len // block_size)


COUNT = integer(1, LARGEST, "an integer from 1 to 2**31 - 1")
SIZE = number(ABOVE_0, 2**30, "a positive number, at most 2**30")


def subclass(base: str, method: str) -> Rule:
    """A rule for a class that is not imported here."""
    words = f"a subclass of {base}"
    return Rule(lambda value: isinstance(value, type) and hasattr(value, method), words)


@dataclass(kw_only=True)
class Config(Options):
    model: str = EMBEDDED_MODEL
    """Local directory or Hugging Face hub id; the embedded model by default."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """On CUDA, "auto" is float16 for a float16 checkpoint and bfloat16 for any other, even a
    float32 one: that would need twice the memory, and vLLM serves it in 16 bits, too. On a CPU,
    "auto" is bfloat16 if the CPU has instructions for it, else float32 (always float32 for the
    embedded model)."""

    device: str = "auto"
    """"auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N"."""

    max_model_len: int | None = None
    """Maximum tokens per sequence, prompt and output together. Default: the longest context that
    the model supports."""

    max_num_seqs: int = 256
    """Maximum sequences per step."""

    max_num_batched_tokens: int | None = None
    """Maximum tokens computed per step; longer prompts are computed in chunks. Default: 8192 on
    CUDA, 384 on a CPU, or `max_num_seqs` if that is more."""

    block_size: int = 16
    """Tokens per KV block (paper, section 7.2: 16 is large enough for the GPU and small enough to
    waste little)."""

    num_blocks: int | None = None
    """Exact number of KV blocks. Default: as many as fit into `gpu_memory_utilization` or
    `kv_cache_gib`."""

    gpu_memory_utilization: float = 0.9
    """Fraction of GPU memory for weights, activations and KV cache together."""

    kv_cache_gib: float = 1.0
    """Size of the KV cache on a CPU, in GiB."""

    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    """How keys and values are stored. "auto" is the model's dtype. "int8" takes about half the
    memory of 16 bits: integers, with a scale for each token and KV head. Where two batches round
    differently in the last bit of float32, an integer may change by one: so tokens that are nearly
    as likely change places a little more often than with "auto". In a model whose keys have one
    very large number, the other numbers of a key lose their digits (chapter 21)."""

    enable_prefix_caching: bool = True
    """Whether to keep full blocks after use and reuse them for requests with the same prefix."""

    preemption_mode: Literal["recompute", "swap"] = "recompute"
    """How a preempted request recovers. With "swap", its blocks wait in host memory (paper, section
    4.5). What does not fit there is recomputed."""

    swap_gib: float = 4.0
    """Host memory for `preemption_mode="swap"`, in GiB."""

    swap_prefixes: bool = False
    """Whether blocks that leave the prefix cache go to host memory, and come back when a request
    has their prefix: in vLLM, `kv_offloading_size`. They fill what preempted requests leave of
    `swap_gib`, so this needs `preemption_mode="swap"`. Off by default: a step waits for its copies,
    also for those of prefixes that no request has again (chapter 04)."""

    attention_backend: Literal["auto", "torch", "numba", "triton", "vattention"] = "auto"
    """What computes attention and the small layers. "auto" uses Triton on CUDA, numba on a CPU, and
    PyTorch where these are missing. Triton needs CUDA, or TRITON_INTERPRET=1 on any device; numba
    is the extra `cpu`. With "vattention", memory is mapped so that attention needs no block tables
    (chapter 20); it needs Linux."""

    quantization: str | None = None
    """With "int8", weights are stored in 8 bits, with a scale for each row; with "int4" in 4 bits,
    with a scale and a zero for each group of 128, 64 or 32 numbers. On a CPU, activations are
    rounded to 8 bits in each product, too, and "int4" is fast for one request, with numba. Where
    two batches round differently in the last bit of float32, a rounded activation may change by a
    whole code: log-probabilities differ by up to 0.2 then, where float32 differs by 2e-5. See
    chapter 21."""

    tensor_parallel_size: int = 1
    """Over how many ranks each layer is split: processes with a device each, see chapter 18."""

    rank_timeout: float = 60.0
    """Seconds after which a rank that gives no sign of life is given up."""

    enforce_eager: bool = False
    """Start every kernel of a decode from Python: no CUDA graph and, on a CPU, no single call."""

    overlap: bool | None = None
    """Whether to launch a step before the tokens of the step before it are read, so that the device
    does not wait for the host (chapter 11). Default: on CUDA. A step that needs the tokens first
    does not overlap: with beams, penalties, grammars, draft tokens, classes of your own or several
    ranks."""

    check_kernels: Literal["cuda", "always", "never"] = "cuda"
    """Where to compare each kernel with PyTorch before the first request. If one computes wrong
    numbers on this machine, there is a ValueError, and no engine."""

    speculative_config: dict | None = None
    """Speculative decoding: propose draft tokens, and check several in one step (chapter 22). The
    fields of SpeculativeConfig, such as {"method": "ngram", "num_speculative_tokens": 4}, or
    {"model": "DIRECTORY"} for a draft model."""

    scheduler_cls: type | None = None
    """A subclass of nanovllm.scheduler.Scheduler. Default of `nanovllm serve`: FairShares, turns
    between clients (chapter 17)."""

    block_manager_cls: type | None = None
    """A subclass of nanovllm.block_manager.BlockManager."""

    seed: int = 0
    """Base seed for requests that set none."""

    RULES: ClassVar[dict[str, Rule]] = {
        "quantization": Rule(
            lambda value: value in ("int8", "int4"),
            "'int8' or 'int4' (a quantized checkpoint needs no option)",
        ),
        "model": Rule(
            lambda value: isinstance(value, str | Path) and len(str(value)) < 999,
            "a hub id or a directory",
        ),
        "device": Rule(
            lambda value: fullmatch(r"auto|cpu|cuda(:\d{1,3})?", str(value)),
            "auto, cpu, cuda or cuda:N",
        ),
        "max_model_len": integer(2, LARGEST, "an integer from 2 to 2**31 - 1"),
        "max_num_seqs": COUNT,
        "max_num_batched_tokens": COUNT,
        "block_size": COUNT,
        "num_blocks": COUNT,
        "gpu_memory_utilization": number(ABOVE_0, 1, "above 0 and at most 1"),
        "kv_cache_gib": SIZE,
        "swap_gib": SIZE,
        "tensor_parallel_size": COUNT,
        "rank_timeout": number(1, 2**30, "a number of seconds, at least 1"),
        "speculative_config": Rule(
            lambda value: isinstance(value, dict), "a dict of SpeculativeConfig's fields"
        ),
        "scheduler_cls": subclass("Scheduler", "schedule"),
        "block_manager_cls": subclass("BlockManager", "allocate"),
        "seed": SEED,
    }

    elsewhere: ClassVar[dict[str, str]] = {
        "enable_chunked_prefill": "it always does; max_num_batched_tokens is the limit of a chunk",
        "swap_space": "did you mean 'swap_gib', with preemption_mode='swap'?",
    }

    def __post_init__(self):
        super().__post_init__()
        is_allowed = self.attention_backend != "vattention" or self.kv_cache_dtype == "auto"
        self.require("kv_cache_dtype", is_allowed, "'auto' with attention_backend='vattention'")
        is_allowed = self.preemption_mode == "swap" or not self.swap_prefixes
        self.require("swap_prefixes", is_allowed, "False without preemption_mode='swap'")
        self.model = str(self.model)
        self.device = str(self.device)

    def resolved(self, longest: int, num_batched_tokens: int, num_drafts: int = 0) -> Limits:
        """Fills in the defaults: the model's longest context, and `TOKENS_PER_STEP` of the device.

        Raises ValueError if `max_model_len` is longer than the model's longest context."""
        max_model_len = longest if self.max_model_len is None else self.max_model_len
        allowed = f"at most {longest}, the model's longest context"
        self.require("max_model_len", max_model_len <= longest, allowed)
        most_tokens = max(num_batched_tokens, self.max_num_seqs)
        return Limits(
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or most_tokens,
            num_drafts=num_drafts,
        )

    def num_blocks_in(self, available: int, block_bytes: int, limits: Limits) -> int:
        """How many KV blocks of `block_bytes` go into `available` bytes, and are of use. Raises
        ValueError if it is none."""
        if available < block_bytes:
            room = f"kv_cache_gib or gpu_memory_utilization leaves {available:,} bytes"
            raise ValueError(f"no memory is left for a KV block of {block_bytes:,} bytes: {room}")
        return min(available // block_bytes, limits.num_useful_blocks(self.block_size))

    def num_host_blocks(self, block_bytes: int, limits: Limits) -> int:
        """How many KV blocks of `block_bytes` the host keeps: without `swap_prefixes`, no more than
        requests can fill. Raises ValueError if there is no room for any."""
        if self.preemption_mode != "swap":
            return 0
        num_blocks = int(self.swap_gib * 2**30) // block_bytes
        self.require("swap_gib", num_blocks, f"room for a KV block of {block_bytes:,} bytes")
        useful = num_blocks if self.swap_prefixes else limits.num_useful_blocks(self.block_size)
        return min(num_blocks, useful)
