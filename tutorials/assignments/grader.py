"""The grader of one assignment: which simulations there are, and what they are worth.

A student's file runs in processes of its own (`process.py`, `player.py`). What it decides is carried
out and measured here and in `referee.py`."""

import os
import re
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanovllm import Run
from nanovllm.schedule import ScheduleError
from nanovllm.scheduler import Scheduler
from tutorials.assignments.problems import Broken, Kind
from tutorials.assignments.process import Process, Submission, Unreadable, end_all, read_source
from tutorials.assignments.public import PROMPTS, SCARCE, answers_of
from tutorials.assignments.referee import EngineReferee, new_referee, referee_for
from tutorials.assignments.report import Report, plain_lines
from tutorials.assignments.task import Goal, Part, Task, name_in_report, serve, serve_baseline

LIMIT = 300.0  # seconds of a processor for a file
MOST_STEPS = 10_000  # of the real engine; first come, first served takes some hundred
HIDDEN = "what it says on secret seeds is not shown, try the public ones"


@dataclass
class Played:
    """What became of a file that was loaded, a simulation, or a run of the engine."""

    verdicts: dict[str, str | None] = field(default_factory=dict)  # what is wrong with an answer
    baseline: Run | None = None
    values: dict[str, float] = field(default_factory=dict)  # of each goal
    num_steps: int = 0
    tokens: Any = None  # of the engine
    problem: str = ""  # an error message for the student, if the file has failed ...
    kind: Kind | None = None  # ... and as much of it as says nothing of the load
    printed: str = ""


@dataclass
class Shared:
    """What is the same for all files: the baseline's runs, and FCFS's answers."""

    baselines: dict[tuple[str, int], Run] = field(default_factory=dict)
    answers: Any = None


@dataclass
class Grader:
    """Grades files of one assignment. Calls `on_check` after each check, so that nothing is lost if
    the machine stops."""

    task: Task
    seeds: list[int]
    limit: float = LIMIT  # seconds for a file
    is_secret: bool = False  # nothing is shown that the file may have learned from the load
    on_check: Callable[[Report], None] = lambda report: None
    shared: Shared = field(default_factory=Shared)
    faults: dict[str, str] = field(default_factory=dict)  # of the file: the check that has said it

    def grade(self, path: Path) -> Report:
        report = Report()
        self.faults = {}
        try:
            source = read_source(path)
        except Unreadable as error:
            self._add(report, "your file", 0, self.task.points, str(error))
            return report
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # the file may replace it
            try:
                self._grade(report, Submission(source, path.name, Path(folder), self.limit))
            finally:
                end_all(Path(folder))
        return report

    def _grade(self, report: Report, submission: Submission) -> None:
        loaded = load(self.task, submission)
        if not self._grade_load(report, loaded):
            return
        plays = [
            (part, seed, self.shared.baselines.get((part.name, seed)))
            for part in self.task.parts
            for seed in self.seeds[: part.num_seeds]
        ]
        works: list[Callable[[], Played]] = [partial(play, submission, *each) for each in plays]
        if self.task.engine_points:
            works.append(partial(play_engine, self.task, submission))
            if self.shared.answers is None:
                works.append(expected_answers)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            try:
                self._grade_results(report, pool.map(result_of, works))
            finally:
                submission.used = self.limit  # after a Ctrl-C: what still runs ends soon

    def _grade_results(self, report: Report, results: Iterator[Played]) -> None:
        for part in self.task.parts:
            seeds = self.seeds[: part.num_seeds]
            played = [next(results) for _ in seeds]
            for seed, each in zip(seeds, played):
                if each.baseline is not None:
                    self.shared.baselines[part.name, seed] = each.baseline
            self._grade_part(report, part, played)
        if self.task.engine_points:
            answered = next(results)
            if self.shared.answers is None:
                expected = next(results)
                self.shared.answers = expected.tokens
                answered = expected if expected.problem else answered
            self._grade_answers(report, answered)

    def _add(self, report: Report, name: str, score: float, max_score: float, output: str) -> None:
        report.add(name, score, max_score, output)
        self.on_check(report)

    def _sentence(self, name: str, played: Played) -> str:
        """What is wrong, for the check with this name. A fault that an earlier check has said, but for
        its numbers, is not said again."""
        said = played.problem
        if self.is_secret and played.kind is not None:
            said = f"{played.kind.value}; {HIDDEN}"
        first = self.faults.setdefault(re.sub(r"\[[^]]*\]|\d+", "", said), name)
        return said if first == name else f"the same fault as in {first}"

    # --- checks ---

    def _grade_load(self, report: Report, played: Played) -> bool:
        """Whether the file can be loaded; and the answers to questions in it."""
        if played.problem:
            name = "your file"
            self._add(report, name, 0, self.task.points, self._sentence(name, played))
            return False
        points = self.task.question_points
        for name, wrong in played.verdicts.items():
            score = 0 if wrong else points
            self._add(report, f"question {name}", score, points, wrong or "right")
        return True

    def _grade_part(self, report: Report, part: Part, played: list[Played]) -> None:
        name = f"{part.name}, rules"
        broken = next((each for each in played if each.problem), None)
        rules = "all kept"
        if not self.is_secret:
            rules += f", in {sum(each.num_steps for each in played):,} steps"
        if broken is not None:
            rules = self._sentence(name, broken)
        if not self.is_secret:
            report.printed = plain_lines(played[-1].printed if broken is None else broken.printed)
        self._add(report, name, 0 if broken else part.points, part.points, rules)
        for goal in part.goals:
            values = [] if broken else [each.values[goal.name] for each in played]
            self._grade_goal(report, part, goal, values)

    def _grade_goal(self, report: Report, part: Part, goal: Goal, values: list[float]) -> None:
        name = name_in_report(part, goal)
        if not values:
            why = f"not measured, because a rule was broken; {goal.wanted}"
            self._add(report, name, 0, goal.points, why)
            return
        worst = goal.worst(values)
        if self.is_secret:
            worst = goal.rounded(worst)  # the points say no more than these four digits
        report.values[name] = worst
        self._add(report, name, goal.score(worst), goal.points, goal.sentence(worst, len(values)))

    def _grade_answers(self, report: Report, played: Played) -> None:
        name, points, expected = "the real engine", self.task.engine_points, self.shared.answers
        if played.problem:
            self._add(report, name, 0, points, self._sentence(name, played))
        elif played.tokens == expected:
            same = "have the same answers as with FCFS and enough memory"
            self._add(report, name, points, points, f"{len(PROMPTS)} prompts {same}")
        else:
            tokens = played.tokens
            is_list = isinstance(tokens, list) and len(tokens) == len(expected)
            wrong = [i for i, right in enumerate(expected) if not is_list or tokens[i] != right]
            other = "other answers than with FCFS and enough memory"
            self._add(report, name, 0, points, f"{other} for the prompts {wrong}")


# --- what is done in threads: each waits for a student's process most of the time ---


def result_of(work: Callable[[], Played]) -> Played:
    """What the work brings; or that the grader itself has failed, which costs no other file its points."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        kind = Kind.GRADER_FAILED
        return Played(problem=f"{kind.value}: {error!r}", kind=kind)


def load(task: Task, submission: Submission) -> Played:
    """Whether the file can be loaded, and its answers to questions."""
    try:
        with Process(submission, constants=("ANSWERS", *task.classes)) as process:
            constants = process.constants
    except Broken as error:
        return failed(error)
    if not isinstance(constants, dict):
        constants = {}
    if not task.questions and not any(constants.get(name) for name in task.classes):
        problem = f"your file has no class {' or '.join(dict.fromkeys(task.classes))}"
        return Played(problem=problem)
    answers = constants.get("ANSWERS")
    if not isinstance(answers, dict):
        answers = {}
    return Played({name: check(answers.get(name)) for name, check in task.questions.items()})


def play(submission: Submission, part: Part, seed: int, baseline: Run | None) -> Played:
    """The student's run beside the baseline's, and what each goal measures."""
    if baseline is None:
        baseline = serve_baseline(part, seed)
    played = Played(baseline=baseline)
    max_steps = 20 * baseline.num_steps + 10_000
    try:
        with Process(submission) as process:
            try:
                referee = new_referee(process, part, max_steps)
                run = serve(part, referee, seed, part.counting, check=False)
            finally:
                played.printed = process.output()
    except (Broken, ScheduleError) as error:
        return replace(failed(error), baseline=baseline, printed=played.printed)
    played.num_steps = run.num_steps
    played.values = {goal.name: goal.measure(run, baseline) for goal in part.goals}
    return played


def failed(error: Broken | ScheduleError) -> Played:
    kind = error.kind if isinstance(error, Broken) else Kind.RULE
    return Played(problem=str(error), kind=kind)


def expected_answers() -> Played:
    return Played(tokens=answers_of(Scheduler))


def play_engine(task: Task, submission: Submission) -> Played:
    """The real engine's answers to a few prompts, with the student's scheduler and scarce
    memory."""
    part = replace(task.parts[0], block_manager=None, counts=())
    try:
        with Process(submission) as process:
            scheduler_cls = referee_for(process, part, MOST_STEPS, EngineReferee)
            return Played(tokens=answers_of(scheduler_cls, part, **SCARCE))
    except (Broken, ScheduleError) as error:
        is_wrapped = isinstance(error.__cause__, Broken)
        return failed(error.__cause__ if is_wrapped else error)
