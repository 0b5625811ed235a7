"""The grader of one assignment: plays a student's file in processes of its own, and adds up points.

The file is trusted not to forge its result. Its mistakes (an endless loop, an exit, a full memory)
happen in a process of `play.py`, within limits, and cost the points of what was played there.
"""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tutorials.assignments import play
from tutorials.assignments.public import PROMPTS
from tutorials.assignments.report import Outcome, Report, plain_lines
from tutorials.assignments.task import Task

LIMIT = 60  # seconds of a processor for a process
WAITING = 10  # times the limit by the clock, since other programs may be busy
MOST_PRINTED = 4000  # bytes
SAME = f"{len(PROMPTS)} prompts have the same answers as with FCFS and enough memory"
START = f"from {play.__name__} import main; main()"
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONIOENCODING": "utf-8:backslashreplace",
    "PYTHONUNBUFFERED": "1",  # a process may end at any time
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",  # the same on each machine, and no memory of a GPU
}


@dataclass
class Player:
    """A process that plays a student's file, in a folder of its own."""

    process: subprocess.Popen
    folder: Path
    limit: int
    start: float = field(default_factory=time.monotonic)

    def outcome(self) -> Outcome:
        """Waits for the end of the process. Whatever has ended it, there is an outcome."""
        seconds = WAITING * self.limit
        try:
            code = self.process.wait(max(0.0, self.start + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Outcome(f"your file has not ended after {seconds:g} s: what does it wait for?")
        try:
            return pickle.loads((self.folder / "outcome").read_bytes())
        except (OSError, EOFError):  # the process has not come to its end
            why = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
            if code == -signal.SIGKILL:
                why = "it took too much time or memory"
            return Outcome(f"your process has ended by itself: {why}")

    def printed(self) -> str:
        """The last bytes of what the file has printed."""
        content = (self.folder / "printed").read_bytes()[-MOST_PRINTED:]
        return plain_lines(content.decode(errors="replace"))


@contextmanager
def playing(module: str, path: Path, limit: int, *what: object) -> Iterator[Player]:
    """Starts a process that plays `what`, see `play.py`. Ends it, and what the file has started."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / "printed").open("wb") as printed:
            process = subprocess.Popen(
                [sys.executable, "-c", START],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
        with process.stdin as pipe:  # nothing of a load is in the command, which others can read
            job = [f"{folder / 'outcome'}", module, f"{path.resolve()}", limit, *what]
            pipe.write(json.dumps(job).encode())
        try:
            yield Player(process, folder, limit)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # the group has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass
class Grader:
    """Grades files of one assignment."""

    task: Task
    module: str  # which has this TASK: the processes import it
    seeds: list[int]
    limit: int = LIMIT
    is_secret: bool = False  # what a file prints of the loads is not shown

    def grade(self, path: Path) -> Iterator[Report]:
        """Yields the report whenever it has grown, so that nothing is lost if the machine stops."""
        report, task = Report(), self.task
        with ExitStack() as ends:

            def start(*what: object) -> Player:
                return ends.enter_context(playing(self.module, path, self.limit, *what))

            (loaded,) = self._outcomes(report, [start("load")])
            if loaded.problem:
                report.add("your file", 0, task.points, loaded.problem)
                yield report
                return
            of_parts = [
                [start("part", index, seed) for seed in self.seeds[: part.num_seeds]]
                for index, part in enumerate(task.parts)
            ]
            engine = start("engine") if task.engine_points else None
            for name, wrong in loaded.verdicts.items():
                points = 0 if wrong else task.question_points
                report.add(f"question {name}", points, task.question_points, wrong or "right")
            yield report
            faults: dict[str, str] = {}
            for part, players in zip(task.parts, of_parts):
                outcomes = self._outcomes(report, players)
                problem = said_once(faults, f"{part.name}, rules", outcomes[-1].problem)
                report.add_part(part, outcomes, problem)
                yield report
            if engine is not None:
                problem = said_once(faults, "the real engine", engine.outcome().problem)
                points = 0 if problem else task.engine_points
                report.add("the real engine", points, task.engine_points, problem or SAME)
                yield report

    def _outcomes(self, report: Report, players: list[Player]) -> list[Outcome]:
        """Up to the first one with a problem."""
        outcomes = []
        for player in players:
            outcomes.append(player.outcome())
            if not self.is_secret:
                report.printed = player.printed()
            if outcomes[-1].problem:
                break
        return outcomes


def said_once(faults: dict[str, str], name: str, problem: str) -> str:
    """The problem of the check with this name. What an earlier check has said, but for its step and
    its numbers, is not said again."""
    if not problem:
        return ""
    first = faults.setdefault(re.sub(r"^step .*? s: |\[[^]]*\]|\d+", "", problem), name)
    return problem if first == name else f"the same fault as in {first}"
