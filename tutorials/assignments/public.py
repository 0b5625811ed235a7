"""Your scheduler beside FCFS, or your router beside RoundRobin, before the grader sees it.

    python -m tutorials.assignments.public a1 my_scheduler.py      # on the first public seed
    python -m tutorials.assignments.public a1 my_scheduler.py 7    # on seed 7
    python -m tutorials.assignments.public a1 my_scheduler.py --gantt run.png

It prints what both reach, and the value of each goal. --gantt draws which requests wait and which run. It needs
matplotlib.
"""

# What the public tests of all assignments share, too: SOLUTION=my_scheduler.py pytest
# tutorials/assignments/a1. Without SOLUTION, they look at the assignment's starter.py, and leave
# out what is slow. Points are the grader's business.

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from nanovllm import Run
from nanovllm.block_manager import BlockManager
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import ScheduleError
from nanovllm.scheduler import Scheduler
from tutorials.assignments.task import (
    NAMES,
    PUBLIC_SEEDS,
    Part,
    Task,
    load_task,
    serve,
    serve_baseline,
    shown,
)
from tutorials.simulation.metrics import summary, table

# --- the student's file ---


def solution(default: str | Path) -> ModuleType:
    """The file that the environment variable SOLUTION names, or `default`, as a module."""
    return load(Path(os.environ.get("SOLUTION") or default))


def load(path: Path) -> ModuleType:
    """The file may have the name of a module of Python, random.py for example."""
    assert path.is_file(), f"{path} is not a file"
    spec = spec_from_file_location(f"solution_{path.stem}", path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def class_of(module: Any, name: str, base: type) -> type:
    """A class of the student's file; the base class need not be in it."""
    cls = getattr(module, name, base if name == base.__name__ else None)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"there is no class {name} that is a subclass of {base.__name__}")
    return cls


def classes_of(part: Part, module: Any) -> tuple[type, type[BlockManager] | None]:
    """The scheduler or the router, and the block manager if the part asks for one. Raises
    ValueError if one is missing."""
    manager_cls = part.block_manager and class_of(module, part.block_manager, BlockManager)
    return class_of(module, *part.policy), manager_cls or None


def explained(error: BaseException, path: Path) -> str:
    """A sentence: what is wrong, and where in the file."""
    text = str(error)
    if not isinstance(error, ScheduleError):
        frames = traceback.extract_tb(error.__traceback__)
        lines = [
            frame.lineno for frame in frames if Path(frame.filename).absolute() == path.absolute()
        ]
        where = f" (line {lines[-1]} of the file)" if lines else ""
        text = f"{type(error).__name__}: {text}".rstrip(": ") + where
    return " ".join(text.split())[:500]


# --- in the simulator ---


def check_rules(part: Part, module: Any, seed: int, check: bool = True) -> Run:
    """Serves the workload, and checks each step. Raises ScheduleError, or AssertionError if tokens
    are missing. Without `check`, only this is noticed."""
    policy_cls, manager_cls = classes_of(part, module)
    run = serve(part, policy_cls, seed, manager_cls, check)
    for i, served in enumerate(run.requests):
        got, wanted = len(served.token_times), served.job.num_outputs
        assert got == wanted, f"request {i} has got {got} of {wanted} tokens"
    if check and part.check_manager and manager_cls:
        part.check_manager(part, manager_cls, seed)
    return run


# --- in the real engine ---

QUESTIONS = [
    "what is 347 + 285?",
    "list all prime numbers within 100",
    "tell me a story about a shy fox " * 6,
    "reverse the words: river stone apple cloud",
]
PROMPTS = [QUESTIONS[i % 4] + "!" * i for i in range(12)]
SCARCE = {"num_blocks": 14, "max_num_batched_tokens": 64, "max_num_seqs": 8}


def check_answers(part: Part, module: Any) -> None:
    """The embedded model answers 12 prompts with little memory and a small budget: no schedule may
    change an answer."""
    scarce = answers_of(class_of(module, part.scheduler, Scheduler), part, **SCARCE)
    for i, (expected, got) in enumerate(zip(expected_answers(), scarce)):
        assert got == expected, (
            f"the tokens of prompt {i} are not those of any other schedule: {got}"
        )


@cache
def expected_answers() -> list[list[list[int]]]:
    """With FCFS and enough memory."""
    return answers_of(Scheduler)


def answers_of(
    scheduler_cls: type[Scheduler], part: Part | None = None, **options
) -> list[list[list[int]]]:
    """The tokens of each output of each prompt. FCFS needs no `part`: it looks at no label."""
    # before torch is imported; the model is too small for more
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from nanovllm import LLM

    guesses = part and part.config.speculative_config
    llm = LLM(scheduler_cls=scheduler_cls, speculative_config=guesses, **options)
    outputs = llm.generate(PROMPTS, new_params(part), use_tqdm=False)
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def new_params(part: Part | None = None) -> list[SamplingParams]:
    """One for each of `PROMPTS`; every third has two outputs. Their labels (`extra_args`) are those
    of requests from the whole load of the part, so a new assignment has its own."""
    labels: list[dict] = [{}] * len(PROMPTS)
    if part is not None:
        jobs = part.workload(PUBLIC_SEEDS[0])
        labels = [jobs[i * len(jobs) // len(PROMPTS)].extra_args for i in range(len(PROMPTS))]
    return [
        SamplingParams(
            n=2 if i % 3 == 0 else 1,
            temperature=0.8 if i % 3 == 0 else 0.0,
            max_tokens=8 + 3 * i,
            ignore_eos=True,
            seed=i,
            extra_args=dict(label),
        )
        for i, label in enumerate(labels)
    ]


# --- the command ---


def serve_both(part: Part, module: Any, seed: int) -> dict[str, Run]:
    """The baseline first."""
    baseline, run = serve_baseline(part, seed), check_rules(part, module, seed)
    return {part.baseline: baseline, part.policy[0]: run}


def compare(part: Part, runs: dict[str, Run]) -> str:
    """What the baseline and the student's policy reach, and the value of each goal."""
    baseline, run = runs.values()
    summaries = {name: summary(run) for name, run in runs.items()}
    lines = [table(summaries), ""]
    for goal in part.goals:
        value = goal.measure(run, baseline)
        points = f"{goal.score(value):.0f} of {goal.points:.0f} points (full from {goal.full})"
        lines.append(f"{goal.name}: {shown(value, '.3f')}, {points}")
    return "\n".join(lines)


def picture_of(task: Task, part: Part, path: Path) -> Path:
    """A task with several parts has several pictures: run_A.png, run_B.png."""
    return path if len(task.parts) == 1 else path.with_stem(f"{path.stem}_{part.name}")


def seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: it must be an integer, 0 or more"
        )
    return int(text)


def requests(text: str) -> slice:
    """40: so many of all; 100:140: those."""
    first, colon, last = text.rpartition(":")
    if not (last.isdecimal() and (first.isdecimal() or not colon)) or int(last) <= int(first or 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: it must be like 40 or 100:140")
    return slice(int(first) if colon else None, int(last))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=NAMES)
    parser.add_argument("path", type=Path, metavar="FILE", help="your file")
    parser.add_argument(
        "seed", type=seed, nargs="?", default=PUBLIC_SEEDS[0], help="of the load (default: 1)"
    )
    parser.add_argument("--gantt", type=Path, metavar="PNG", help="draw both runs into this file")
    parser.add_argument(
        "--requests",
        type=requests,
        default="40",
        help="which to draw: 40 of all (default), or 100:140 for those, in the order of arrival",
    )
    args = parser.parse_args(argv)
    if not args.path.is_file():
        parser.error(f"{args.path}: there is no such file")
    if args.gantt is not None:
        if find_spec("matplotlib") is None:
            parser.error("--gantt needs matplotlib: pip install matplotlib")
        if args.gantt.suffix != ".png" or not args.gantt.parent.is_dir():
            parser.error(
                f"--gantt {args.gantt} is not allowed: it must be a .png in a folder that is there"
            )
    args.module, args.task = load(args.path), load_task(args.task)
    try:
        for part in args.task.parts:
            classes_of(part, args.module)
    except ValueError as error:
        parser.error(f"{args.path}: {error}")
    for part in args.task.parts if args.gantt else []:
        count = len(part.workload(args.seed))
        if (args.requests.start or 0) >= count:
            parser.error(f"--requests is not allowed: the load has only {count:,} requests")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    for part in args.task.parts:
        if args.gantt is not None:
            part = replace(part, keep_steps=True)
        print(f"{part.name}, seed {args.seed}", flush=True)  # a run may take long
        runs = serve_both(part, args.module, args.seed)
        print(compare(part, runs), flush=True)
        if args.gantt is not None:
            from tutorials.assignments.gantt import draw

            path = picture_of(args.task, part, args.gantt)
            draw(runs, path, args.requests, f"{part.name}, seed {args.seed}")
            print(f"\ndrawn: {path}")


if __name__ == "__main__":
    main()
