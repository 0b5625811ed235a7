"""Config: every option of the engine, with its default and its limits. Imports no torch."""

from dataclasses import dataclass, fields
from pathlib import Path
from re import fullmatch
from typing import ClassVar, Literal, get_args, get_origin

from nanovllm.options import Options, is_int, is_number, option, refusal

EMBEDDED_MODEL = str(Path(__file__).parent / "tiny_qwen3")
LARGEST = 2**31 - 1
TOKENS_PER_STEP = {"cuda": 8192, "cpu": 384}  # the default of max_num_batched_tokens


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What follows from a Config for one model on one device. The scheduler keeps within them."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def num_useful_blocks(self, block_size: int) -> int:
        """The number of KV blocks that the sequences of a step can fill; more are of no use."""
        return self.max_num_seqs * -(-self.max_model_len // block_size)


@dataclass(kw_only=True)
class Config(Options):
    model: str = option(
        EMBEDDED_MODEL, "Local directory or Hugging Face hub id; the embedded model by default."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        'On CUDA, "auto" is float16 for a float16 checkpoint and bfloat16 for any other, even a'
        " float32 one: that would need twice the memory, and vLLM serves it in 16 bits, too. On"
        ' a CPU, "auto" is bfloat16 if the CPU has instructions for it, else float32 (always '
        "float32 for the embedded model).",
    )
    device: str = option("auto", '"auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N".')
    max_model_len: int | None = option(
        None,
        "Maximum tokens per sequence, prompt and output together. Default: the longest context "
        "that the model supports.",
    )
    max_num_seqs: int = option(256, "Maximum sequences per step.")
    max_num_batched_tokens: int | None = option(
        None,
        "Maximum tokens computed per step; longer prompts are computed in chunks. Default: 8192"
        " on CUDA, 384 on a CPU, or `max_num_seqs` if that is more.",
    )
    block_size: int = option(
        16,
        "Tokens per KV block (paper, section 7.2: 16 is large enough for the GPU and small "
        "enough to waste little).",
    )
    num_blocks: int | None = option(
        None,
        "Exact number of KV blocks. Default: as many as fit into `gpu_memory_utilization` or "
        "`kv_cache_gib`.",
    )
    gpu_memory_utilization: float = option(
        0.9, "Fraction of GPU memory for weights, activations and KV cache together."
    )
    kv_cache_gib: float = option(1.0, "Size of the KV cache on a CPU, in GiB.")
    enable_prefix_caching: bool = option(
        True,
        "Whether to keep full blocks after use and reuse them for requests with the same prefix.",
    )
    preemption_mode: Literal["recompute", "swap"] = option(
        "recompute",
        'How a preempted request recovers. With "swap", its blocks wait in host memory (paper, '
        "section 4.5). What does not fit there is recomputed.",
    )
    swap_gib: float = option(4.0, 'Host memory for `preemption_mode="swap"`, in GiB.')
    attention_backend: Literal["auto", "torch", "triton", "vattention"] = option(
        "auto",
        "What computes attention and the small layers. Triton needs CUDA, or TRITON_INTERPRET=1"
        ' on any device; "auto" uses Triton on CUDA. With "vattention", memory is mapped so '
        "that attention needs no block tables (chapter 20); it needs Linux.",
    )
    tensor_parallel_size: int = option(
        1, "Over how many ranks each layer is split: processes with a device each, see chapter 18."
    )
    rank_timeout: float = option(
        60.0, "Seconds after which a rank that gives no sign of life is given up."
    )
    enforce_eager: bool = option(
        False, "Launch every kernel of a decode step from Python instead of replaying a CUDA graph."
    )
    scheduler_cls: type | None = option(None, "A subclass of nanovllm.scheduler.Scheduler.")
    block_manager_cls: type | None = option(
        None, "A subclass of nanovllm.block_manager.BlockManager."
    )
    seed: int = option(0, "Base seed for requests that set none.")

    elsewhere: ClassVar[dict[str, str]] = {
        "enable_chunked_prefill": "it always does; max_num_batched_tokens is the limit of a chunk",
        "swap_space": "did you mean 'swap_gib', with preemption_mode='swap'?",
    }

    def __post_init__(self):
        is_name = isinstance(self.model, str | Path) and len(str(self.model)) < 999
        self.require("model", is_name, "a hub id or a directory")
        self.model = str(self.model)
        self.device = str(self.device)
        is_device = fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device)
        self.require("device", is_device, "auto, cpu, cuda or cuda:N")
        self._check_choices()
        self._check_counts()
        self._check_memory()
        self._check_classes()
        self.require("seed", is_int(self.seed, 0, 2**63 - 1), "an integer from 0 to 2**63 - 1")

    def _check_choices(self) -> None:
        for field in fields(self):
            if get_origin(field.type) is Literal:
                *others, last = choices = get_args(field.type)
                is_choice = getattr(self, field.name) in choices
                self.require(field.name, is_choice, f"{', '.join(others)} or {last}")
        for name in ("enable_prefix_caching", "enforce_eager"):
            self.require(name, isinstance(getattr(self, name), bool), "True or False")

    def _check_counts(self) -> None:
        for name in ("max_num_seqs", "block_size", "tensor_parallel_size"):
            is_count = is_int(getattr(self, name), 1, LARGEST)
            self.require(name, is_count, "an integer from 1 to 2**31 - 1")
        for name, low in (("max_model_len", 2), ("max_num_batched_tokens", 1), ("num_blocks", 1)):
            value = getattr(self, name)
            is_count = value is None or is_int(value, low, LARGEST)
            self.require(name, is_count, f"an integer from {low} to 2**31 - 1 or None")

    def _check_memory(self) -> None:
        share = self.gpu_memory_utilization
        is_share = is_number(share, 0, 1) and share > 0
        self.require("gpu_memory_utilization", is_share, "above 0 and at most 1")
        is_patience = is_number(self.rank_timeout, 1, 2**30)
        self.require("rank_timeout", is_patience, "a number of seconds, at least 1")
        for name in ("kv_cache_gib", "swap_gib"):
            size = getattr(self, name)
            is_size = is_number(size, 0, 2**30) and size > 0
            self.require(name, is_size, "a positive number, at most 2**30")

    def _check_classes(self) -> None:
        for name, base, method in (
            ("scheduler_cls", "Scheduler", "schedule"),
            ("block_manager_cls", "BlockManager", "allocate"),
        ):
            cls = getattr(self, name)
            is_subclass = isinstance(cls, type) and hasattr(cls, method)
            self.require(name, cls is None or is_subclass, f"None or a subclass of {base}")

    def resolved(self, longest: int, num_batched_tokens: int) -> Limits:
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
        )

    def num_blocks_in(self, available: int, block_bytes: int, limits: Limits) -> int:
        """How many KV blocks of `block_bytes` go into `available` bytes, and are of use. Raises
        ValueError if it is none."""
        if available < block_bytes:
            room = f"{available:,} bytes are available"
            raise ValueError(f"no memory is left for a KV block of {block_bytes:,} bytes: {room}")
        return min(available // block_bytes, limits.num_useful_blocks(self.block_size))

    def num_host_blocks(self, block_bytes: int, limits: Limits) -> int:
        """How many KV blocks of `block_bytes` the host keeps for requests that are swapped out.
        Raises ValueError if there is no room for any."""
        if self.preemption_mode != "swap":
            return 0
        num_blocks = int(self.swap_gib * 2**30) // block_bytes
        self.require("swap_gib", num_blocks, f"room for a KV block of {block_bytes:,} bytes")
        return min(num_blocks, limits.num_useful_blocks(self.block_size))


def check_heads(num_ranks: int, heads: int, kv_heads: int) -> None:
    """Raises ValueError if so many ranks cannot share them. One KV head may be on several."""
    if heads % num_ranks or (kv_heads % num_ranks and num_ranks % kv_heads):
        problem = f"{heads} query heads and {kv_heads} KV heads cannot be divided by it"
        raise refusal("tensor_parallel_size", num_ranks, problem)
