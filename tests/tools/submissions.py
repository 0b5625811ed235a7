"""What students hand in, and an assignment that takes little time."""

from textwrap import indent

from nanovllm.config import Config
from tutorials.assignments.task import Goal, Part, Task
from tutorials.simulation.workloads import all_at_once, sharegpt, workload

HEAD = "from nanovllm.scheduler import Scheduler\n"
FCFS = HEAD + "class MyScheduler(Scheduler):\n    pass\n"
GOAL = Goal("seconds", lambda run, baseline: run.seconds / baseline.seconds, 0.9, 0.5, points=70)
CONFIG = Config(model="qwen3-0.6b", num_blocks=400, max_model_len=4096, max_num_seqs=32)
PART = Part(
    "load", lambda seed: workload(all_at_once(), sharegpt(512, seed), 6), CONFIG, [GOAL], 30
)
TASK = Task("short", [PART], engine_points=0)


def sentence(results: dict) -> str:
    """Of the first check, which has no points."""
    assert results["score"] == 0, results
    return results["tests"][0]["output"]


def method(body: str, name: str = "schedule", arguments: str = "") -> str:
    """A scheduler of which one method has these lines."""
    lines = indent(body.strip(), " " * 8)
    return f"{HEAD}class MyScheduler(Scheduler):\n    def {name}(self{arguments}):\n{lines}\n"


def priority(value: str) -> str:
    """A scheduler with these keys."""
    return method(f"return {value}", "priority", ", request")


SHORTEST_FIRST = priority("request.params.extra_args['predicted_tokens']")


def choose(body: str) -> str:
    """A router that has these lines; `in_turn` is what the baseline does."""
    lines = indent(f"in_turn = super().choose\n{body.strip()}", " " * 8)
    head = "from nanovllm import RoundRobin\nclass MyRouter(RoundRobin):\n"
    return f"{head}    def choose(self, request, loads):\n{lines}\n"
