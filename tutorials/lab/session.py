"""Session: answers what the page of the lab asks. Runs in a web worker, and as plain Python in tests.

    for answer in Session(folder).answers({"do": "run", "task": "a1", "part": 0, "seed": 1, "source": text}):
        ...

Questions and answers are dicts that JSON can hold. Imports no torch.
"""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from tutorials.assignments.public import check_rules, load
from tutorials.assignments.report import Outcome, Report, outcome_of
from tutorials.assignments.task import PUBLIC_SEEDS, Part, load_task, serve_baseline
from tutorials.lab.problems import problem_of
from tutorials.lab.public_tests import NEEDS_ENGINE, outcome, public_tests
from tutorials.lab.runs import baseline_of, results, run_beside
from tutorials.lab.sheets import SHEETS

FREE = "free"
MOST_PRINTED = 4000  # characters
Answer = dict[str, Any]


class Printed(io.StringIO):
    """Keeps the last characters of what the file prints."""

    def write(self, text: str) -> int:
        super().write(text[-MOST_PRINTED:])
        if self.tell() > 2 * MOST_PRINTED:
            kept = self.getvalue()[-MOST_PRINTED:]
            self.seek(0)
            self.truncate()
            super().write(kept)
        return len(text)


class Session:
    """What one worker knows: the folder in which it keeps the student's file."""

    def __init__(self, folder: Path):
        self.folder = folder

    def texts(self, question: str) -> Iterator[str]:
        """As JSON."""
        for answer in self.answers(json.loads(question)):
            yield json.dumps(answer)

    def answers(self, question: dict[str, Any]) -> Iterator[Answer]:
        """The last one has `done`. What is wrong with the file is an answer with `sentence`."""
        file = self.folder / ("my_router.py" if question.get("task") == "a8" else "my_scheduler.py")
        printed = Printed()
        do = {"run": run, "tests": tests, "points": points, "sheet": sheet}[question["do"]]
        try:
            file.write_text(question.get("source", ""), encoding="utf-8")
            found = do(file, **question)
            while answer := next_of(found, printed):
                yield answer
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            yield problem_of(error, file)
        yield {"done": True, "printed": printed.getvalue()[-MOST_PRINTED:]}


def next_of(found: Iterator[Answer], printed: Printed) -> Answer | None:
    """The next answer; what the file prints meanwhile is not for our own output."""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        return next(found, None)


# --- a file ---


def run(file: Path, task: str, part: int, seed: int, **_) -> Iterator[Answer]:
    """The policy beside the baseline."""
    module = load(file)
    chosen = free_part(module) if task == FREE else load_task(task).parts[part]
    baseline = serve_baseline(chosen, seed) if task == FREE else baseline_of(task, part, seed)
    own, film = run_beside(chosen, baseline, module, seed)
    yield results(chosen, baseline, own, film)


def free_part(module: Any) -> Part:
    """Of a file that says itself what is served. Raises ValueError."""
    jobs, server = getattr(module, "load", None), getattr(module, "SERVER", None)
    if not callable(jobs):
        raise ValueError("there is no function load(seed), which returns the jobs")
    if not isinstance(server, Config):
        raise ValueError("there is no SERVER = Config(...), which says how large the server is")
    return Part("free sheet", jobs, server, [], points=0, keep_steps=True)


def tests(file: Path, task: str, **_) -> Iterator[Answer]:
    load(file)  # what is wrong with it is said once
    for test in public_tests(task, file):
        yield {"progress": test.sentence}
        yield outcome(test, file)


def points(file: Path, task: str, **_) -> Iterator[Answer]:
    """On the public seeds, with the sentences of the grader. The real engine is left out."""
    module, assignment, report = load(file), load_task(task), Report()
    for index, part in enumerate(assignment.parts):
        outcomes: list[Outcome] = []
        problem, before = "", len(report.checks)
        for seed in PUBLIC_SEEDS[: part.num_seeds]:
            yield {"progress": f"{part.name}, seed {seed}"}
            baseline = baseline_of(task, index, seed)
            try:
                outcomes.append(outcome_of(part, check_rules(part, module, seed), baseline))
            except Exception as error:
                problem = problem_of(error, file)["sentence"]
                break
        report.add_part(part, outcomes, problem)
        for check in report.checks[before:]:
            yield {
                "check": check.name,
                "score": check.score,
                "most": check.max_score,
                "says": check.output,
            }
    if assignment.engine_points:
        yield {"check": "the real engine", "most": assignment.engine_points, "says": NEEDS_ENGINE}
    yield {"total": report.score, "most": report.max_score}


# --- a sheet with controls ---


def sheet(file: Path, name: str, values: dict[str, Any], **_) -> Iterator[Answer]:
    yield SHEETS[name].results(values)
