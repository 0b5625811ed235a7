"""nanovllm: vLLM's ideas, small enough to read."""

from nanovllm.decoding.beam_search import BeamSearchParams
from nanovllm.decoding.structured import StructuredOutputsParams
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "BeamSearchParams", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name):  # PEP 562: importing nanovllm does not import torch
    if name == "LLM":
        from nanovllm.engine import LLM

        return LLM
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
