"""The real scheduler under a virtual clock, with a cost model. Imports no torch.

Chapters: 14_simulator, 15_believe, 16_policies.
"""

from nanovllm.simulator.jobs import Job
from nanovllm.simulator.replica import Run
from nanovllm.simulator.simulation import simulate

__all__ = ["Job", "Run", "simulate"]
