"""Choices for this machine: a device, a dtype, and a backend for the layers."""

from __future__ import annotations

import logging

import torch

from nanovllm.backends import torch_ops
from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.layers.ops import Ops, try_out
from nanovllm.options import refusal, shown

NEEDS = {
    "numba": "the extra `cpu`",
    "triton": "a GPU that it supports, gcc and Python's headers (apt install gcc python3-dev), or "
    "TRITON_INTERPRET=1 on Linux; attention_backend='torch' needs none of these",
    "vattention": "Triton, on a GPU",
}


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
    asked = name = config.attention_backend
    is_cuda = device.type == "cuda"
    if asked == "auto":
        name = "triton" if is_cuda else "numba"
    config.require("attention_backend", not is_cuda or name != "numba", "another one on CUDA")
    allowed = "float32 or float16: Triton's interpreter multiplies bfloat16 wrongly"
    config.require("dtype", is_cuda or name != "triton" or dtype != torch.bfloat16, allowed)
    try:
        try_out(torch_ops, device)
    except RuntimeError as error:  # for one, PyTorch was not built for this GPU
        raise refusal("device", config.device, f"only 'cpu' works here: {shown(error)}") from error
    try:
        if name == "numba":
            from nanovllm.backends import numba_ops

            return numba_ops
        if name == "triton":
            from nanovllm.backends import triton_ops

            try_out(triton_ops, device)
            return triton_ops
        if name == "vattention":
            from nanovllm.topics.vattention import ops as vattention_ops  # chapter 20

            return vattention_ops.on_gpu() if is_cuda else vattention_ops.on_cpu()
    except Exception as error:  # it is not there, not for this machine, or cannot compile
        problem = f"{name} needs {NEEDS[name]}: {shown(error)}"
        if name == asked:
            raise refusal("attention_backend", name, problem) from error
        if not isinstance(error, ImportError):
            logging.getLogger(__name__).warning("PyTorch computes, more slowly: %s", problem)
    return torch_ops
