"""A student's file in a process of its own. Whatever the file does, `ask` answers in time or raises
`Broken`, and after `close` nothing of it runs.

On Linux the process that grades is a *sub-reaper*: who loses his parent becomes its child. So all
descendants are found, also those that have left their process group. Elsewhere the group is ended.
"""

import builtins
import ctypes
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutorials.assignments.accounts import Account

ROOT = Path(__file__).parents[2]
PLAYER = Path(__file__).with_name("player.py")
START = "import sys; sys.path.insert(0, {!r}); from player import main; main()"
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
LONGEST_ANSWER = 2**20  # bytes; an honest one has some thousand
SECONDS_TO_START = 20.0
SECONDS_PER_CALL = 5.0
SECONDS_TO_SAY_WHERE = 5.0  # for the stack of a process that hangs
SECONDS_TO_END = 10.0


class Broken(Exception):
    """The student's process has failed. The message is a sentence for the student. `outline` is
    the part of it that does not come from the process: what may be said if the load is secret."""

    def __init__(self, outline: str, detail: str = ""):
        super().__init__(outline + detail)
        self.outline = outline


# --- what all processes of a submission share ---


@dataclass
class Submission:
    source: str
    name: str  # of the file, for its messages
    folder: Path  # of the submission: removed at its end, whatever has become of what is inside
    deadline: float  # for everything, by time.monotonic()
    limit: float  # the same as the number of seconds that there were
    account: Account | None  # whom its processes run as

    @property
    def library(self) -> Path:
        """See copy_library."""
        return self.folder / "library"

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def too_late(self) -> Broken:
        return Broken(f"your file has taken more than {self.limit:g} s in all")


def read_source(path: Path) -> str:
    """In UTF-8, or what a `coding` comment says, with or without a byte order mark."""
    content = path.read_bytes()
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Broken("your file is in UTF-16: save it as UTF-8")
    try:
        return importlib.util.decode_source(content)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Broken(f"your file is not in UTF-8: see line {line}") from None
    except (SyntaxError, LookupError, UnicodeError) as error:
        raise Broken("your file has an encoding that Python does not know", f": {error}") from None


def copy_library(folder: Path) -> None:
    """All of the repository that a student's process imports, in folder/library: nanovllm and the
    player. With what Python has compiled of it."""
    library = folder / "library"
    shutil.copytree(ROOT / "nanovllm", library / "nanovllm")
    shutil.copy2(PLAYER, library)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


# --- descendants ---


def children() -> set[int]:
    """Processes whose parent is this one."""
    if sys.platform != "linux":
        return set()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                # after the name, which may contain anything
                state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(state[1]) == os.getpid():
                    found.add(int(entry.name))
    return found


class Descendants:
    """At the exit, all processes that were started since the entrance are ended."""

    def __enter__(self):
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.others = children()
        return self

    def __exit__(self, *_) -> None:
        until = time.monotonic() + SECONDS_TO_END
        while ours := children() - self.others:
            for pid in ours:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):  # somebody else has waited for it
                    os.waitpid(pid, 0)
            if time.monotonic() > until:
                raise RuntimeError(f"these processes of the file could not be ended: {ours}")


# --- one process ---


class Process:
    def __init__(
        self,
        submission: Submission,
        constants: tuple[str, ...] = (),
        megabytes: int = 2048,
        seconds_per_call: float | None = None,
    ):
        if sys.platform == "linux":
            # a process of the same user cannot read our memory
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
        self.submission = submission
        self.seconds_per_call = seconds_per_call or SECONDS_PER_CALL
        self.buffer = b""
        with ExitStack() as ends:  # if anything fails, all before it is undone
            self.printed = ends.enter_context(tempfile.TemporaryFile())
            # what the process works in is inside, so it can be removed whatever has become of it
            directory = tempfile.TemporaryDirectory(
                dir=submission.folder, ignore_cleanup_errors=True
            )
            self.directory = ends.enter_context(directory)
            ends.enter_context(Descendants())
            self.process = self._start(megabytes)
            ends.callback(self._end)
            start = {"source": submission.source, "name": submission.name, "constants": constants}
            self.constants = self.ask(start, SECONDS_TO_START).get("constants")
            self.close = ends.pop_all().close

    def _start(self, megabytes: int) -> subprocess.Popen:
        os.chmod(self.directory, 0o755)
        home = Path(self.directory, "work")
        home.mkdir()
        account = self.submission.account
        owner: dict[str, Any] = {}
        if account is not None:
            os.chown(home, account.uid, account.gid)
            owner = {"user": account.uid, "group": account.gid, "extra_groups": []}
        settings = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(home),
            "TMPDIR": str(home),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        seconds = max(1, round(self.submission.seconds_left()))
        command = [sys.executable, "-I", "-B", "-c", START.format(str(self.submission.library))]
        process = subprocess.Popen(
            [*command, str(megabytes), str(seconds)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            cwd=home,
            env=settings,
            start_new_session=True,
            **owner,
        )
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def ask(self, message: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Sends one line and waits for one line. Raises Broken if the answer is an error, late, or
        none."""
        limit = seconds or self.seconds_per_call
        until = min(time.monotonic() + limit, self.submission.deadline)
        self._send(json.dumps(message).encode() + b"\n", until, limit)
        line = self._receive(until, limit)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise Broken("your process has sent what is no decision", f": {line[:80]!r}")
        if "error" in answer:
            raise self._error(answer)
        return answer

    def _send(self, line: bytes, until: float, limit: float) -> None:
        pipe = self.process.stdin.fileno()
        while line:
            wait = until - time.monotonic()
            # who reads nothing lets the pipe fill
            if wait <= 0 or not select.select([], [pipe], [], wait)[1]:
                raise self._late(limit)
            try:
                line = line[os.write(pipe, line) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._ended() from None

    def _receive(self, until: float, limit: float) -> bytes:
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            wait = until - time.monotonic()
            if wait <= 0 or not select.select([pipe], [], [], wait)[0]:
                raise self._late(limit)
            received = os.read(pipe, 2**16)
            if not received:
                raise self._ended()
            self.buffer += received
            if len(self.buffer) > LONGEST_ANSWER:
                raise Broken("your process has sent more than 1 MiB for one step")
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line

    # --- sentences ---

    def _error(self, answer: dict[str, Any]) -> Broken:
        """What the process says of an error. Only the name of a known one and a line of the file
        are sure to say nothing of the load."""
        kind, line = answer.get("kind"), answer.get("line")
        known = getattr(builtins, kind, None) if isinstance(kind, str) else None
        is_known = isinstance(known, type) and issubclass(known, BaseException)
        outline = kind if is_known else "a rule is broken"
        if isinstance(line, int) and 0 < line <= self.submission.source.count("\n") + 1:
            outline += f" in line {line} of your file"
        broken = Broken(outline)
        broken.args = (str(answer["error"]),)
        return broken

    def _late(self, limit: float) -> Broken:
        if self.submission.seconds_left() <= 0:
            return self.submission.too_late()
        where = self._where_it_hangs()
        return Broken(f"your file has not answered for {limit:g} s", f": it was in {where}")

    def _where_it_hangs(self) -> str:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)  # its handler prints the stack
        until = time.monotonic() + SECONDS_TO_SAY_WHERE
        lines: list[str] = []
        while not lines and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
            printed = [line.strip() for line in self.output().splitlines()]
            lines = [line for line in printed if "File" in line and "nanovllm" not in line]
        return lines[0].removeprefix("File ") if lines else "an unknown place"

    def _ended(self) -> Broken:
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return Broken("your process has closed the pipe through which it answers")
        reasons = {
            -signal.SIGXCPU: "it took too much time",
            -signal.SIGKILL: "it took too much memory or time",
        }
        why = reasons.get(code, f"exit status {code}")
        return Broken(f"your process has ended by itself: {why}")

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
