"""What a grading comes to: checks with points, as a table and as Gradescope's results.json."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from nanovllm import Run
from tutorials.assignments.task import Part, name_in_report

LONGEST = 500  # characters of an error message


@dataclass
class Check:
    name: str
    score: float
    max_score: float
    output: str  # what was measured, what full points need, or what is wrong


@dataclass
class Outcome:
    """What came of a run of a student's file."""

    problem: str = ""  # an error message for the student; if there is one, nothing else counts
    verdicts: dict[str, str | None] = field(default_factory=dict)  # what is wrong with an answer
    values: dict[str, float] = field(default_factory=dict)  # of each goal
    num_steps: int = 0


def outcome_of(part: Part, run: Run, baseline: Run) -> Outcome:
    values = {goal.name: goal.measure(run, baseline) for goal in part.goals}
    return Outcome(values=values, num_steps=run.num_steps)


@dataclass
class Report:
    checks: list[Check] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)  # of each goal: the worst of all seeds
    printed: str = ""  # by the student's file

    def add(self, name: str, score: float, max_score: float, output: str) -> None:
        self.checks.append(Check(name, round(score, 2), max_score, one_line(output)))

    def add_part(self, part: Part, outcomes: list[Outcome], problem: str = "") -> None:
        """The rules, and each goal: the worst of all seeds counts. `problem` says what is broken."""
        kept = f"all kept, in {sum(one.num_steps for one in outcomes):,} steps"
        self.add(f"{part.name}, rules", 0 if problem else part.points, part.points, problem or kept)
        for goal in part.goals:
            name = name_in_report(part, goal)
            if problem:
                why = f"not measured, because a rule was broken; {goal.wanted}"
                self.add(name, 0, goal.points, why)
                continue
            values = [one.values[goal.name] for one in outcomes]
            worst = goal.worst(values)
            self.values[name] = worst
            self.add(name, goal.score(worst), goal.points, goal.sentence(worst, len(values)))

    @property
    def score(self) -> float:
        return sum(check.score for check in self.checks)

    @property
    def max_score(self) -> float:
        return sum(check.max_score for check in self.checks)

    def lines(self) -> list[str]:
        return [
            f"{check.score:6.1f} of {check.max_score:4.0f}  {check.name}: {check.output}"
            for check in self.checks
        ]

    def last_line(self) -> str:
        return f"{self.score:6.1f} of {self.max_score:4.0f}  in all"

    def table(self) -> str:
        return "\n".join([*self.lines(), self.last_line()])

    def results(self) -> dict:
        """For Gradescope. The checks are public, only the seeds are not."""
        tests = [
            {
                "number": str(i),
                "name": check.name,
                "score": check.score,
                "max_score": check.max_score,
                "output": check.output,
            }
            for i, check in enumerate(self.checks, start=1)
        ]
        board = [{"name": name, "value": round(value, 4)} for name, value in self.values.items()]
        return {
            "score": self.score,
            "tests": tests,
            "leaderboard": board,
            "output": self.printed,
            "visibility": "visible",
        }

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(self.results(), indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Beside the file first, so that there is never half a file, and no other if the disk is full."""
    beside = path.with_name(f"{path.name}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def one_line(text: str) -> str:
    """What a student's process says, as one line that no terminal and no file refuses."""
    plain = "".join(c if c.isprintable() else " " for c in text[: 10 * LONGEST])
    words = " ".join(plain.split())
    return words if len(words) <= LONGEST else f"{words[:LONGEST]} ..."


def plain_lines(text: str) -> str:
    """The same for what it prints, which has lines."""
    return "\n".join(
        "".join(c if c.isprintable() else " " for c in line) for line in text.split("\n")
    )
