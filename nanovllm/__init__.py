"""nanovllm: vLLM's ideas, small enough to read.

What users, students and lecturers import by name: these names stay, wherever their modules lie. A
module is loaded when its name is asked for (PEP 562), so importing nanovllm loads no torch.
"""

from importlib import import_module

from nanovllm.sampling_params import SamplingParams

SIMULATOR = "nanovllm.topics.simulator"  # chapter 14
ROUTER = "nanovllm.topics.routing.router"  # chapter 19
LATE = {
    "LLM": "nanovllm.engine",
    "BeamSearchParams": "nanovllm.topics.decoding.beam_search",  # chapter 13
    "StructuredOutputsParams": "nanovllm.topics.decoding.structured",  # chapter 17
    "Job": f"{SIMULATOR}.jobs",
    "Run": f"{SIMULATOR}.jobs",
    "Served": f"{SIMULATOR}.jobs",
    "MACHINES": f"{SIMULATOR}.machines",
    "simulate": f"{SIMULATOR}.simulation",
    "Router": ROUTER,
    "RoundRobin": ROUTER,
    "LeastLoaded": ROUTER,
    "PrefixAffinity": ROUTER,
}

__all__ = ["SamplingParams", *LATE]


def __getattr__(name):
    if name in LATE:
        return getattr(import_module(LATE[name]), name)
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
