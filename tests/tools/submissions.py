"""What students hand in, and an assignment that takes little time."""

from textwrap import indent

from nanovllm import Run
from nanovllm.config import Config
from tutorials.assignments.task import Goal, Part, Task, mean_latency
from tutorials.simulation.workloads import all_at_once, predicted, sharegpt, workload

CONFIG = Config(
    model="qwen3-0.6b",
    num_blocks=200,
    max_model_len=4096,
    max_num_batched_tokens=512,
    max_num_seqs=32,
)


def jobs(seed: int):
    return predicted(workload(all_at_once(), sharegpt(512, seed), 40), sigma=0.0)


def latency_share(run: Run, baseline: Run) -> float:
    return mean_latency(run) / mean_latency(baseline)


def is_even(answer) -> str | None:
    return None if answer in (2, 4) else f"{answer!r} is not 2 or 4"


GOAL = Goal("mean latency", latency_share, none=1.5, full=0.5, points=40)
TASK = Task(
    "short",
    [
        Part("load", jobs, CONFIG, [GOAL], 20),
        Part("routers", jobs, CONFIG, [GOAL], 10, router="MyRouter", replicas=2),
    ],
    engine_points=0,
    questions={"A": is_even},
    question_points=5,
)

HEAD = "from nanovllm.scheduler import Scheduler\n"
FCFS = HEAD + "class MyScheduler(Scheduler):\n    pass\n"


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
