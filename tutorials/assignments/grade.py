"""Grades a student's file: python -m tutorials.assignments.grade a1 my_scheduler.py [--json results.json]

Each check is a simulation or a run of the real engine. The student's file runs in a process of its
own (`player.py`), the verdict is made here (`referee.py`). Needs Linux or macOS. `--json` writes
what Gradescope reads."""

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from nanovllm.schedule import ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.simulator import Run, simulate
from tutorials.assignments.public import PROMPTS, SCARCE, answers_of, new_params
from tutorials.assignments.referee import Broken, Process, referee_for
from tutorials.assignments.task import (
    NAMES,
    PUBLIC_SEEDS,
    Goal,
    Part,
    Task,
    load_task,
    serve_by_fcfs,
)


@dataclass
class Check:
    name: str
    score: float
    max_score: float
    output: str  # what was measured, what full points need, or what is wrong


@dataclass
class Report:
    checks: list[Check] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)  # of each goal: the worst of all seeds
    printed: str = ""  # by the student's file

    @property
    def score(self) -> float:
        return sum(check.score for check in self.checks)

    @property
    def max_score(self) -> float:
        return sum(check.max_score for check in self.checks)

    def table(self) -> str:
        lines = [
            f"{check.score:6.1f} of {check.max_score:4.0f}  {check.name}: {check.output}"
            for check in self.checks
        ]
        return "\n".join([*lines, f"{self.score:6.1f} of {self.max_score:4.0f}  in all"])

    def results(self) -> dict:
        """For Gradescope. Everything is visible: the checks are public, only the seeds are not."""
        tests = [
            {
                "number": str(i),
                "name": c.name,
                "score": c.score,
                "max_score": c.max_score,
                "output": c.output,
            }
            for i, c in enumerate(self.checks, start=1)
        ]
        board = [{"name": name, "value": round(value, 4)} for name, value in self.values.items()]
        return {
            "score": self.score,
            "tests": tests,
            "leaderboard": board,
            "output": self.printed,
            "visibility": "visible",
        }


class Grader:
    """Grades one file. Calls `report` after each check, so that nothing is lost if the machine
    stops."""

    def __init__(
        self,
        task: Task,
        path: Path,
        seeds: list[int],
        user: str | None = None,
        report=lambda report: None,
    ):
        self.task, self.path, self.seeds, self.user = task, path, seeds, user
        self.report, self.on_check = Report(), report

    def grade(self) -> Report:
        if self._loads():
            for part in self.task.parts:
                self._grade_part(part)
            if self.task.engine_points:
                self._grade_answers()
        return self.report

    def _add(self, name: str, score: float, max_score: float, output: str) -> None:
        self.report.checks.append(Check(name, round(score, 2), max_score, output))
        self.on_check(self.report)

    def _process(self, **options) -> Process:
        return Process(self.path, user=self.user, **options)

    def _loads(self) -> bool:
        """Whether the file can be loaded; and grades the answers to questions in it."""
        questions = self.task.questions
        try:
            with self._process(constants=("ANSWERS",)) as process:
                answers = process.constants["ANSWERS"]
        except Broken as error:
            self._add("your file", 0, self.task.points, str(error))
            return False
        for name, digest in questions.items():
            answer = answers.get(name) if isinstance(answers, dict) else None
            is_right = hashlib.sha256(str(answer).strip().lower().encode()).hexdigest() == digest
            points = self.task.question_points
            self._add(
                f"question {name}",
                points * is_right,
                points,
                f"{str(answer)[:80]!r} is {'right' if is_right else 'wrong'}",
            )
        return True

    # --- simulations ---

    def _grade_part(self, part: Part) -> None:
        values: dict[str, list[float]] = {goal.name: [] for goal in part.goals}
        problem, num_steps = None, 0
        for seed in self.seeds[: part.num_seeds]:
            try:
                run, baseline = self._simulate(part, seed)
            except (Broken, ScheduleError) as error:
                problem = str(error)
                break
            num_steps += run.num_steps
            for goal in part.goals:
                values[goal.name].append(goal.measure(run, baseline))
        rules = problem or f"all kept, in {num_steps:,} steps"
        self._add(f"{part.name}, rules", 0 if problem else part.points, part.points, rules)
        for goal in part.goals:
            self._grade_goal(part, goal, [] if problem else values[goal.name])

    def _grade_goal(self, part: Part, goal: Goal, values: list[float]) -> None:
        name = f"{part.name}, {goal.name}"
        wanted = f"full points at {goal.full:g}, none at {goal.none:g}"
        if not values:
            self._add(name, 0, goal.points, f"not measured, because a rule was broken; {wanted}")
            return
        worst = min(values) if goal.full > goal.none else max(values)
        self.report.values[name] = worst
        self._add(
            name,
            goal.score(worst),
            goal.points,
            f"{worst:.4g}, the worst of {len(values)}; {wanted}",
        )

    def _simulate(self, part: Part, seed: int) -> tuple[Run, Run]:
        """The student's run and that of FCFS."""
        baseline = serve_by_fcfs(part, seed)
        max_steps = 20 * baseline.num_steps + 10_000
        with self._process() as process:
            try:
                referee = referee_for(process, part.scheduler, part.block_manager, max_steps)
                return simulate(
                    part.workload(seed), part.config, part.hardware, referee, check=True
                ), baseline
            finally:
                self.report.printed = process.output()

    # --- the real engine ---

    def _grade_answers(self) -> None:
        name, points = "the real engine", self.task.engine_points
        prompts, fields = PROMPTS, [vars(params) for params in new_params(self.task.parts[0])]
        start = {
            "scheduler": self.task.parts[0].scheduler,
            "options": SCARCE,
            "prompts": prompts,
            "params": fields,
        }
        try:
            with self._process(megabytes=16_384, seconds_per_call=120) as process:
                process.send(start)
                expected = answers_of(Scheduler)  # meanwhile
                answers = process.receive().get("tokens")
        except Broken as error:
            self._add(name, 0, points, str(error))
            return
        if answers == expected:
            self._add(
                name,
                points,
                points,
                f"{len(prompts)} prompts have the same answers as with FCFS and enough memory",
            )
            return
        is_list = isinstance(answers, list) and len(answers) == len(expected)
        wrong = [i for i, tokens in enumerate(expected) if not is_list or answers[i] != tokens]
        self._add(
            name,
            0,
            points,
            f"other answers than with FCFS and enough memory for the prompts {wrong}",
        )


def secret_seeds(secret: str, name: str, count: int = 3) -> list[int]:
    """Seeds that only those can know who have the secret. Change it, and all workloads are new."""
    return [
        int(hashlib.sha256(f"{secret}/{name}/{i}".encode()).hexdigest()[:7], 16)
        for i in range(count)
    ]


def grade(name: str, path: Path, seeds: list[int], **options) -> Report:
    return Grader(load_task(name), path, seeds, **options).grade()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=NAMES)
    parser.add_argument("path", type=Path, help="the student's file")
    parser.add_argument("--json", type=Path, help="write Gradescope's results.json to this file")
    parser.add_argument(
        "--secret",
        type=Path,
        help="a file with a secret, which gives other seeds than the public ones",
    )
    parser.add_argument("--user", help="run the student's file as this user (needs root)")
    args = parser.parse_args()
    if not args.path.is_file():
        parser.error(f"path={str(args.path)!r} is not allowed: there is no such file")
    seeds = (
        secret_seeds(args.secret.read_text().strip(), args.task)
        if args.secret
        else list(PUBLIC_SEEDS)
    )

    def report(report: Report) -> None:
        print(report.table().splitlines()[-2], flush=True)
        if args.json:
            args.json.write_text(json.dumps(report.results(), indent=1) + "\n")

    try:
        result = grade(args.task, args.path, seeds, user=args.user, report=report)
    except (LookupError, PermissionError) as error:
        if args.user is None:
            raise
        parser.error(
            f"--user {args.user} is not allowed: this user cannot run {sys.executable}: {error}"
        )
    print(result.table().splitlines()[-1])
    if result.printed:
        print(f"--- what your file has printed last ---\n{result.printed}", file=sys.stderr)


if __name__ == "__main__":
    main()
