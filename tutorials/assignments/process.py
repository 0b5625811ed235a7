"""A student's file in a process of its own. Whatever the file does, `ask` answers in time or raises
`Broken`, and `close` ends it."""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutorials.assignments.problems import Broken, Kind

ROOT = Path(__file__).parents[2]
START = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tutorials.assignments.player import main
main()
"""
LONGEST_ANSWER = 2**20  # bytes; an honest one has some thousand
SECONDS_TO_START = 20.0
SECONDS_PER_CALL = 5.0
PATIENCE = 0.8  # of the seconds for an answer, until a process prints where it is
IDLE = 0.25  # of a second counts in which a process neither computes nor waits for a processor


# --- what all processes of a submission share ---


@dataclass
class Submission:
    source: str
    name: str  # of the file, for its messages
    folder: Path  # where its processes work, each in a folder of its own
    limit: float  # seconds for all answers
    used: float = 0.0  # as much of it as is gone

    def seconds_left(self) -> float:
        return self.limit - self.used

    def too_late(self) -> Broken:
        return Broken(Kind.TOO_LATE, f"your file has taken more than {self.limit:g} s in all")


class Unreadable(Exception):
    """A file that is not text. The message is for the student."""


def read_source(path: Path) -> str:
    """In UTF-8, or what a `coding` comment says, with or without a byte order mark."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"your file cannot be read: {error.strerror}") from None
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Unreadable("your file is in UTF-16: save it as UTF-8")
    try:
        return importlib.util.decode_source(content)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"your file is not in UTF-8: see line {line}") from None
    except (SyntaxError, LookupError, UnicodeError) as error:
        raise Unreadable(f"your file has an encoding that Python does not know: {error}") from None


# --- one process ---


def seconds_of(pid: int) -> tuple[float, float]:
    """How long a process has computed, and how long it has waited for a processor, as far as the
    system says so (Linux)."""
    try:
        busy, starved, _ = Path(f"/proc/{pid}/schedstat").read_bytes().split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(busy) / 1e9, int(starved) / 1e9


def end_all(folder: Path) -> None:
    """Ends what a file has started in a session of its own and with its own environment (Linux)."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # of another user, or it has ended
            if bytes(folder) in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


class Process:
    def __init__(
        self,
        submission: Submission,
        constants: tuple[str, ...] = (),
        megabytes: int = 2048,
        seconds_per_call: float | None = None,
    ):
        self.submission = submission
        self.seconds_per_call = seconds_per_call or SECONDS_PER_CALL
        self.buffer = b""
        self.busy = self.starved = self.asked = 0.0  # seconds; and when it was asked, by its clock
        with ExitStack() as ends:  # if anything fails, all before it is undone
            self.printed = ends.enter_context(tempfile.TemporaryFile())
            self.process = self._start(megabytes)
            ends.callback(self._end)
            start = {"source": submission.source, "name": submission.name, "constants": constants}
            self.constants = self.ask(start, SECONDS_TO_START).get("constants")
            self.close = ends.pop_all().close

    def _start(self, megabytes: int) -> subprocess.Popen:
        try:
            folder = tempfile.mkdtemp(dir=self.submission.folder)
        except OSError:
            raise Broken(Kind.RULE, "your file has replaced the folder in which it works") from None
        settings = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": folder,
            "TMPDIR": folder,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }
        seconds = max(1, round(self.submission.seconds_left()))
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", START, str(megabytes), str(seconds)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            cwd=folder,
            env=settings,
            start_new_session=True,
        )
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def ask(self, message: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Sends one line and waits for one line. Raises Broken if the answer is an error, late, or
        none."""
        limit = seconds or self.seconds_per_call
        self.asked, busy = self.clock(), self.busy
        until = self.asked + min(limit, self.submission.seconds_left())
        question = message | {"patience": PATIENCE * limit}
        try:
            self._send(json.dumps(question).encode() + b"\n", until, limit)
            line = self._receive(until, limit)
        finally:
            seconds, busy = self.clock() - self.asked, self.busy - busy
            self.submission.used += busy + IDLE * max(0.0, seconds - busy)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise Broken(Kind.NO_DECISION, f"{Kind.NO_DECISION.value}: {line[:80]!r}")
        if "error" in answer:
            kind = Kind.RULE if answer.get("is_rule") is True else Kind.RAISED
            raise Broken(kind, str(answer["error"]))
        return answer

    def clock(self) -> float:
        """In seconds. It stands still while the process waits for a processor, so that a busy machine
        takes no time away from the file."""
        busy, starved = seconds_of(self.process.pid)
        self.busy, self.starved = max(self.busy, busy), max(self.starved, starved)
        return time.monotonic() - self.starved

    def _send(self, line: bytes, until: float, limit: float) -> None:
        pipe = self.process.stdin.fileno()
        while line:
            wait = until - self.clock()
            # a process that reads nothing lets the pipe fill
            if wait <= 0:
                raise self._late(limit)
            if not select.select([], [pipe], [], wait)[1]:
                continue
            try:
                line = line[os.write(pipe, line) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._ended() from None

    def _receive(self, until: float, limit: float) -> bytes:
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            wait = until - self.clock()
            if wait <= 0:
                raise self._late(limit)
            if not select.select([pipe], [], [], wait)[0]:
                continue
            received = os.read(pipe, 2**16)
            if not received:
                raise self._ended()
            self.buffer += received
            if len(self.buffer) > LONGEST_ANSWER:
                sentence = "your process has sent more than 1 MiB for one step"
                raise Broken(Kind.NO_DECISION, sentence)
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line

    # --- sentences ---

    def _late(self, limit: float) -> Broken:
        if self.submission.seconds_left() <= self.clock() - self.asked:
            return self.submission.too_late()
        printed = [line.strip() for line in self.output().splitlines()]
        lines = [line for line in printed if "File" in line and "nanovllm" not in line]
        where = lines[0].removeprefix("File ") if lines else "an unknown place"
        return Broken(Kind.SILENT, f"your file has not answered for {limit:g} s: it was in {where}")

    def _ended(self) -> Broken:
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            sentence = "your process has closed the pipe through which it answers"
            return Broken(Kind.ENDED, sentence)
        reasons = {
            -signal.SIGXCPU: "it took too much time",
            -signal.SIGKILL: "it took too much memory or time",
        }
        why = reasons.get(code, f"exit status {code}")
        return Broken(Kind.ENDED, f"{Kind.ENDED.value}: {why}")

    def output(self) -> str:
        """What the student's file has printed, at most the last 4,000 bytes."""
        file = self.printed.fileno()
        size = os.fstat(file).st_size
        return os.pread(file, 4000, max(0, size - 4000)).decode(errors="replace")

    def _end(self) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()
