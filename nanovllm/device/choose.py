"""What suits this machine: a device, a dtype, and a backend for the layers."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from nanovllm.config import EMBEDDED_MODEL, Config, Limits
from nanovllm.layers.kv_cache import CacheShape
from nanovllm.layers.ops import Ops
from nanovllm.options import refusal

if TYPE_CHECKING:
    from nanovllm.vattention.cache import VirtualShape


def choose_device(config: Config) -> torch.device:
    """Returns the CPU, or a GPU with its index: plain `cuda` is another one in each thread."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return device
    found = torch.cuda.device_count()
    if (device.index or 0) >= found:
        raise refusal("device", config.device, f"PyTorch finds {found} CUDA devices")
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index)


def choose_dtype(config: Config, hf_config, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cuda":
        own = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if has_bfloat16 and own != torch.float16 else torch.float16
    if config.model == EMBEDDED_MODEL or config.attention_backend == "triton":
        return torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def choose_ops(config: Config, device: torch.device, dtype: torch.dtype) -> Ops:
    """Imports only the backend that is chosen: Triton does not exist on macOS and Windows."""
    backend = config.attention_backend
    is_cuda = device.type == "cuda"
    can_launch = is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    has_triton = can_launch and find_spec("triton") is not None
    if backend == "auto" and is_cuda:
        backend = "triton" if has_triton else "torch"
    if backend in ("auto", "numba"):
        config.require("attention_backend", not is_cuda, "another one on CUDA")
        try:
            from nanovllm.layers import numba_ops

            return numba_ops
        except ImportError as error:  # numba is not there, or not for this Python or NumPy
            if backend == "numba":
                problem = f"it needs the extra `cpu`: {error}"
                raise refusal("attention_backend", backend, problem) from error
    if backend in ("auto", "torch"):
        from nanovllm.layers import torch_ops

        return torch_ops
    if backend == "vattention":
        from nanovllm.vattention import ops as vattention_ops

        return vattention_ops
    if not has_triton:
        needs = "it needs a GPU, or TRITON_INTERPRET=1 on Linux"
        raise refusal("attention_backend", backend, needs)
    allowed = "float32 or float16: Triton's interpreter multiplies bfloat16 wrongly"
    config.require("dtype", is_cuda or dtype != torch.bfloat16, allowed)
    from nanovllm.layers import triton_ops

    return triton_ops


def choose_cache(
    config: Config, limits: Limits, device: torch.device, shape: CacheShape
) -> CacheShape | VirtualShape:
    if config.attention_backend != "vattention":
        return shape
    from nanovllm.vattention.cache import VirtualShape
    from nanovllm.vattention.memory import system_of

    return VirtualShape(shape, limits, system_of(device))
