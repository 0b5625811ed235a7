"""What the public tests of all assignments share: they load the student's file, and check that it
is correct.

    SOLUTION=my_scheduler.py pytest tutorials/assignments/a1
    python -m tutorials.assignments.public a1 my_scheduler.py     # your scheduler beside FCFS, on the first public seed
    python -m tutorials.assignments.public a1 my_scheduler.py 7   # on seed 7

Without SOLUTION, the tests look at the assignment's starter.py, and leave out what is slow. Points
are the grader's business.
"""

import os
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.simulator import Run
from tutorials.assignments.task import PUBLIC_SEEDS, Part, load_task, serve, serve_by_fcfs
from tutorials.simulation.metrics import summary, table


def solution(default: str | Path) -> ModuleType:
    """The file that the environment variable SOLUTION names, or `default`, as a module."""
    return load(Path(os.environ.get("SOLUTION") or default))


def load(path: Path) -> ModuleType:
    assert path.is_file(), f"{path} is not a file"
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def check_rules(part: Part, module: ModuleType, seed: int) -> Run:
    """Serves the workload, and checks each step. Raises ScheduleError, or AssertionError if tokens
    are missing."""
    manager_cls = part.block_manager and getattr(module, part.block_manager)
    run = serve(part, getattr(module, part.scheduler), seed, manager_cls)
    for i, served in enumerate(run.requests):
        got, wanted = len(served.token_times), served.job.num_outputs
        assert got == wanted, f"request {i} has got {got} of {wanted} tokens"
    return run


QUESTIONS = [
    "what is 347 + 285?",
    "list all prime numbers within 100",
    "tell me a story about a shy fox " * 6,
    "reverse the words: river stone apple cloud",
]
PROMPTS = [QUESTIONS[i % 4] + "!" * i for i in range(12)]
SCARCE = {"num_blocks": 14, "max_num_batched_tokens": 64, "max_num_seqs": 8}


def check_answers(module: ModuleType, scheduler: str = "MyScheduler") -> None:
    """The embedded model answers 12 prompts with little memory and a small budget: no schedule may
    change an answer."""
    # before torch is imported; the model is too small for more
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    scarce = answers_of(getattr(module, scheduler), **SCARCE)
    for i, (expected, got) in enumerate(zip(expected_answers(), scarce)):
        assert got == expected, (
            f"the tokens of prompt {i} are not those of any other schedule: {got}"
        )


@cache
def expected_answers() -> list[list[list[int]]]:
    """With FCFS and enough memory."""
    return answers_of(Scheduler)


def answers_of(scheduler_cls: type[Scheduler], **options) -> list[list[list[int]]]:
    """The tokens of each output of each prompt."""
    from nanovllm import LLM

    llm = LLM(scheduler_cls=scheduler_cls, **options)
    outputs = llm.generate(PROMPTS, [new_params(i) for i in range(len(PROMPTS))], use_tqdm=False)
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def new_params(i: int) -> SamplingParams:
    """Every third prompt has two outputs. `extra_args` has all that any assignment looks at."""
    extra_args = {
        "tenant": "ABC"[i % 3],
        "predicted_tokens": 8 + i,
        "deadline": 1.0 + i,
        "urgent": i % 4 == 0,
    }
    n = 2 if i % 3 == 0 else 1
    return SamplingParams(
        n=n,
        temperature=0.8 * (n > 1),
        max_tokens=8 + 3 * i,
        ignore_eos=True,
        seed=i,
        extra_args=extra_args,
    )


def compare(part: Part, module: ModuleType, seed: int) -> str:
    """What FCFS and the student's scheduler reach, and the value of each goal."""
    baseline, run = serve_by_fcfs(part, seed), check_rules(part, module, seed)
    lines = [
        f"{part.name}, seed {seed}",
        table({"FCFS": summary(baseline), part.scheduler: summary(run)}),
        "",
    ]
    for goal in part.goals:
        value = goal.measure(run, baseline)
        points = f"{goal.score(value):.0f} of {goal.points:.0f} points (full from {goal.full})"
        lines.append(f"{goal.name}: {value:.3f}, {points}")
    return "\n".join(lines)


if __name__ == "__main__":
    for part in load_task(sys.argv[1]).parts:
        print(compare(part, load(Path(sys.argv[2])), int((*sys.argv[3:], PUBLIC_SEEDS[0])[0])))
