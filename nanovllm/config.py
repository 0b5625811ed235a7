"""Config: every option of the engine, with its default and its limits. Imports no torch."""

from dataclasses import dataclass, fields
from pathlib import Path
from re import fullmatch
from typing import Literal, get_args, get_origin

from nanovllm.options import Options, is_int, is_number

EMBEDDED_MODEL = str(Path(__file__).parent / "tiny_qwen3")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits that follow from a Config for one model on one device. The scheduler keeps within them."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(kw_only=True)
class Config(Options):
    model: str = EMBEDDED_MODEL
    """Local directory or Hugging Face hub id; the embedded model by default."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """On CUDA, "auto" is float16 for a float16 checkpoint and bfloat16 for any other, even a float32 one: that would
    need twice the memory, and vLLM serves it in 16 bits, too. On a CPU, "auto" is bfloat16 if the CPU has instructions
    for it, else float32 (always float32 for the embedded model)."""
    device: str = "auto"
    """"auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N"."""
    max_model_len: int | None = None
    """Maximum tokens per sequence, prompt and output together. Default: the longest context that the model supports."""
    max_num_seqs: int = 256
    """Maximum sequences per step."""
    max_num_batched_tokens: int | None = None
    """Maximum tokens computed per step; longer prompts are computed in chunks. Default: 8192 on CUDA, 2048 on a CPU."""
    block_size: int = 16
    """Tokens per KV block (paper, section 7.2: 16 is large enough for the GPU and small enough to waste little)."""
    num_blocks: int | None = None
    """Exact number of KV blocks. Default: as many as fit into `gpu_memory_utilization` or `kv_cache_gib`."""
    gpu_memory_utilization: float = 0.9
    """Fraction of GPU memory for weights, activations and KV cache together."""
    kv_cache_gib: float = 1.0
    """Size of the KV cache on a CPU, in GiB."""
    enable_prefix_caching: bool = True
    """Whether to keep full blocks after use and reuse them for requests with the same prefix."""
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    """How a preempted request recovers. With "swap", its blocks wait in host memory (paper, section 4.5). What does not
    fit there is recomputed."""
    swap_gib: float = 4.0
    """Host memory for `preemption_mode="swap"`, in GiB."""
    attention_backend: Literal["auto", "torch", "triton"] = "auto"
    """What computes attention and the small layers. Triton needs CUDA, or TRITON_INTERPRET=1 on any device; "auto" uses
    Triton on CUDA."""
    enforce_eager: bool = False
    """Launch every kernel of a decode step from Python instead of replaying a CUDA graph."""
    scheduler_cls: type | None = None
    """A subclass of nanovllm.scheduler.Scheduler."""
    block_manager_cls: type | None = None
    """A subclass of nanovllm.block_manager.BlockManager."""
    seed: int = 0
    """Base seed for requests that set none."""

    def __post_init__(self):
        is_name = isinstance(self.model, str | Path) and len(str(self.model)) < 999
        self.require("model", is_name, "a hub id or a directory")
        self.model, self.device = str(self.model), str(self.device)
        self.require(
            "device",
            fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device),
            "auto, cpu, cuda or cuda:N",
        )
        for field in fields(self):
            if get_origin(field.type) is Literal:
                *others, last = get_args(field.type)
                self.require(
                    field.name,
                    getattr(self, field.name) in [*others, last],
                    f"{', '.join(others)} or {last}",
                )
        for name in (
            "max_num_seqs",
            "block_size",
            "max_model_len",
            "max_num_batched_tokens",
            "num_blocks",
        ):
            low, is_unset = (
                1 + (name == "max_model_len"),
                getattr(self, name) is getattr(Config, name) is None,
            )
            allowed = f"an integer from {low} to 2**31 - 1" + " or None" * (
                getattr(Config, name) is None
            )
            self.require(name, is_unset or is_int(getattr(self, name), low, 2**31 - 1), allowed)
        share = self.gpu_memory_utilization
        self.require(
            "gpu_memory_utilization", is_number(share, 0, 1) and share > 0, "above 0 and at most 1"
        )
        for name in ("kv_cache_gib", "swap_gib"):
            size = getattr(self, name)
            self.require(
                name, is_number(size, 0, 2**30) and size > 0, "a positive number, at most 2**30"
            )
        for name in ("enable_prefix_caching", "enforce_eager"):
            self.require(name, isinstance(getattr(self, name), bool), "True or False")
        for name, method in (("scheduler_cls", "schedule"), ("block_manager_cls", "allocate")):
            cls, base = getattr(self, name), "Scheduler" if method == "schedule" else "BlockManager"
            is_class = isinstance(cls, type) and hasattr(cls, method)
            self.require(name, is_class or cls is None, f"None or a subclass of {base}")
        self.require("seed", is_int(self.seed, 0, 2**63 - 1), "an integer from 0 to 2**63 - 1")

    def resolved(self, longest: int, num_batched_tokens: int) -> Limits:
        """Fills in the defaults: the model's longest context, and how many tokens per step suit the device."""
        max_model_len = longest if self.max_model_len is None else self.max_model_len
        self.require(
            "max_model_len",
            max_model_len <= longest,
            f"at most {longest}, the model's longest context",
        )
        tokens = self.max_num_batched_tokens or num_batched_tokens
        return Limits(
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=tokens,
        )
