"""What students hand in, and an assignment that takes little time."""

import os
import sys

import pytest

from nanovllm.config import Config
from tutorials.assignments.task import Goal, Part, Task
from tutorials.simulation.workloads import all_at_once, sharegpt, workload

HEAD = "from nanovllm.scheduler import Scheduler\n"
FCFS = HEAD + "class MyScheduler(Scheduler):\n    pass\n"
GOAL = Goal("seconds", lambda run, baseline: run.seconds / baseline.seconds, 0.9, 0.5, points=70)
CONFIG = Config(model="qwen3-0.6b", num_blocks=400, max_model_len=4096, max_num_seqs=32)
TASK = Task(
    "short",
    [
        Part(
            "load",
            lambda seed: workload(all_at_once(), sharegpt(512, seed), 6),
            CONFIG,
            [GOAL],
            30,
        )
    ],
    engine_points=0,
)
# a user without a name; another for each worker, since two runs of the tests may share a machine
UID = 50_000 + os.getpid() % 10_000
for_root = pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0, reason="only root can run a file as another user"
)


def sentence(results: dict) -> str:
    """Of the first check, which has no points."""
    assert results["score"] == 0, results
    return results["tests"][0]["output"]


def method(body: str, name: str = "schedule", arguments: str = "") -> str:
    """A scheduler of which one method has these lines."""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return f"{HEAD}class MyScheduler(Scheduler):\n    def {name}(self{arguments}):\n{lines}"
