"""Config: every knob of the engine, with its default and its limits. No torch in here."""

import sys
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import inf
from pathlib import Path
from re import fullmatch

EMBEDDED_MODEL = str(Path(__file__).parent / "tiny_qwen3")


class Options:
    """Base of Config and SamplingParams: an unknown keyword is an error that names the nearest field."""

    def __new__(cls, *args, **kwargs):
        if args:
            raise ValueError(f"{cls.__name__} takes keyword arguments only, not {args[0]!r}")
        names = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in names:
                nearest = get_close_matches(name, names, n=1, cutoff=0.5)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"allowed are {', '.join(names)}"
                raise ValueError(f"{cls.__name__} has no field {name!r}: {hint}")
        return super().__new__(cls)

    def require(self, name, condition, allowed):
        """Raises a ValueError that names the field, its value and what is allowed."""
        if not condition:
            raise ValueError(f"{name}={shown(getattr(self, name))} is not allowed: it must be {allowed}")


def shown(value, most_chars: int = 200) -> str:
    """The value as an error message names it: a text or number of any length in one line."""
    try:
        text = repr(value)
    except Exception:  # Python writes no integer of more than 4,300 digits, and who knows what others do
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= most_chars else f"{text[:most_chars]}... ({len(text):,} characters)"


def is_int(value, low, high=inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value, low, high=sys.float_info.max) -> bool:
    """Whether it is one that fits into a float. No comparison holds for NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


@dataclass(kw_only=True)
class Config(Options):
    model: str = EMBEDDED_MODEL
    """Local directory or Hugging Face hub id; the embedded model by default."""
    dtype: str = "auto"
    """"auto", "float32", "bfloat16" or "float16". Auto is on CUDA float16 for a checkpoint in float16 and bfloat16 for
    any other, also for one in float32: it would need twice the memory, and vLLM serves it in 16 bits, too. On a CPU auto
    is bfloat16 where the CPU multiplies in it and float32 elsewhere (always for the embedded model)."""
    device: str = "auto"
    """"auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N"."""
    max_model_len: int | None = None
    """Most tokens of one sequence, prompt and output together. Default: what the model was made for."""
    max_num_seqs: int = 256
    """Most sequences that run in one step."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step; longer prompts are cut into chunks. Default: 8192 on CUDA, 2048 on CPU."""
    block_size: int = 16
    """Tokens in a KV block (paper, section 7.2: 16 is large enough for the GPU and small enough to waste little)."""
    num_blocks: int | None = None
    """KV blocks, exactly. Default: what fits into `gpu_memory_utilization` or `kv_cache_gib`."""
    gpu_memory_utilization: float = 0.9
    """Part of the GPU's memory for weights, activations and KV cache together."""
    kv_cache_gib: float = 1.0
    """Memory for the KV cache on a CPU, in GiB."""
    enable_prefix_caching: bool = True
    """Whether full blocks are kept after use and found again by requests with the same prefix."""
    preemption_mode: str = "recompute"
    """How a preempted request recovers: "recompute", or "swap" (its blocks wait in the host's memory; paper, section
    4.5). What does not fit there is recomputed."""
    swap_gib: float = 4.0
    """The host's memory for `preemption_mode="swap"`, in GiB."""
    attention_backend: str = "auto"
    """"torch", "triton" (CUDA, or any device with TRITON_INTERPRET=1), or "auto": triton on CUDA, else torch."""
    enforce_eager: bool = False
    """Whether to launch every kernel of a decode step from Python, and not to replay CUDA graphs."""
    scheduler_cls: type | None = None
    """A subclass of nanovllm.scheduler.Scheduler."""
    block_manager_cls: type | None = None
    """A subclass of nanovllm.block_manager.BlockManager."""
    seed: int = 0
    """Where requests without a seed of their own get theirs from."""

    def __post_init__(self):
        self.require(
            "model", isinstance(self.model, str | Path) and len(str(self.model)) < 999, "a hub id or a directory"
        )
        self.model, self.device = str(self.model), str(self.device)
        self.require("device", fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device), "auto, cpu, cuda or cuda:N")
        for name, *allowed in (
            ("dtype", "auto", "float32", "bfloat16", "float16"),
            ("preemption_mode", "recompute", "swap"),
            ("attention_backend", "auto", "torch", "triton"),
        ):
            self.require(name, getattr(self, name) in allowed, f"{', '.join(allowed[:-1])} or {allowed[-1]}")
        for name in ("max_num_seqs", "block_size", "max_model_len", "max_num_batched_tokens", "num_blocks"):
            low, is_unset = 1 + (name == "max_model_len"), getattr(self, name) is getattr(Config, name) is None
            allowed = f"an integer from {low} to 2**31 - 1" + " or None" * (getattr(Config, name) is None)
            self.require(name, is_unset or is_int(getattr(self, name), low, 2**31 - 1), allowed)
        share = self.gpu_memory_utilization
        self.require("gpu_memory_utilization", is_number(share, 0, 1) and share > 0, "above 0 and at most 1")
        for name in ("kv_cache_gib", "swap_gib"):
            size = getattr(self, name)
            self.require(name, is_number(size, 0, 2**30) and size > 0, "a positive number, at most 2**30")
        for name in ("enable_prefix_caching", "enforce_eager"):
            self.require(name, isinstance(getattr(self, name), bool), "True or False")
        for name, method in (("scheduler_cls", "schedule"), ("block_manager_cls", "allocate")):
            cls, base = getattr(self, name), "Scheduler" if method == "schedule" else "BlockManager"
            is_class = isinstance(cls, type) and hasattr(cls, method)
            self.require(name, is_class or cls is None, f"None or a subclass of {base}")
        self.require("seed", is_int(self.seed, 0, 2**63 - 1), "an integer from 0 to 2**63 - 1")
