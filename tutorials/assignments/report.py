"""What a grading comes to: checks with points, as a table and as Gradescope's results.json."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

LONGEST = 500  # characters of an error message


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

    def add(self, name: str, score: float, max_score: float, output: str) -> None:
        self.checks.append(Check(name, round(score, 2), max_score, one_line(output)))

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
