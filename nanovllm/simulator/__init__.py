"""The simulator: the real scheduler under a virtual clock, with a cost model in place of the model.
Imports no torch.
"""

from nanovllm.simulator.jobs import Job
from nanovllm.simulator.replica import Run
from nanovllm.simulator.simulation import simulate

__all__ = ["Job", "Run", "simulate"]
