"""The side of the grader that is believed: it asks a student's process for decisions, checks and
carries them out.

A `Referee` is a scheduler like any other, so `simulate` runs it. What it is told to do, it does
with the base class's own methods, its own block tables and its own limits. Whatever a process
claims, it can only choose among what is allowed."""

import ctypes
import json
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from nanovllm.options import is_int, shown
from nanovllm.schedule import Item, Schedule, ScheduleError, check_choice
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

ROOT = Path(__file__).parents[2]
START = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tutorials.assignments.player import main; main()"
PR_SET_DUMPABLE = 4


class Broken(Exception):
    """The student's process has failed. The message is a sentence for the student."""


class Process:
    """A student's file in a process of its own, with limits of time, memory and output."""

    def __init__(
        self,
        path: Path,
        constants: tuple[str, ...] = (),
        megabytes: int = 2048,
        seconds: int = 600,
        seconds_per_call: float = 5.0,
        user: str | None = None,
    ):
        if sys.platform == "linux":
            # a process of the same user cannot read our memory
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
        self.seconds_per_call, self.deadline = seconds_per_call, time.monotonic() + seconds
        self.buffer, self.seconds = b"", seconds
        self.printed, name = tempfile.mkstemp()
        os.unlink(name)
        self.directory = tempfile.TemporaryDirectory()
        owner: dict[str, Any] = {}
        if user is not None:
            shutil.chown(self.directory.name, user)
            owner = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        settings = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": self.directory.name,
            "PYTHONHASHSEED": "0",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", START, str(megabytes), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            cwd=self.directory.name,
            env=settings
            | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
            **owner,
        )
        start = {"source": path.read_text(), "name": path.name, "constants": constants}
        try:
            self.constants = self.ask(start, seconds_per_call=20).get("constants", {})
        except BaseException:
            self.close()
            raise

    def ask(self, message: dict[str, Any], seconds_per_call: float | None = None) -> dict[str, Any]:
        """Sends one line and waits for one line. Raises Broken if the answer is an error, late, or
        none."""
        self.send(message)
        return self.receive(seconds_per_call)

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Broken(self._how_it_ended()) from None

    def receive(self, seconds_per_call: float | None = None) -> dict[str, Any]:
        limit = seconds_per_call or self.seconds_per_call
        until = min(time.monotonic() + limit, self.deadline)
        assert self.process.stdout is not None
        output = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            wait = until - time.monotonic()
            if wait <= 0 or not select.select([output], [], [], wait)[0]:
                raise Broken(self._where_it_hangs(limit))
            received = os.read(output, 2**16)
            if not received or len(self.buffer) > 2**24:
                raise Broken(self._how_it_ended())
            self.buffer += received
        line, self.buffer = self.buffer.split(b"\n", 1)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Broken(f"your process has sent {line[:80]!r}, which is no decision")
        if "error" in answer:
            raise Broken(str(answer["error"])[:2000])
        return answer

    def _where_it_hangs(self, limit: float) -> str:
        os.kill(self.process.pid, signal.SIGUSR1)  # its handler prints the stack
        until = time.monotonic() + 5
        lines: list[str] = []
        while not lines and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
            printed = [line.strip() for line in self.output().splitlines()]
            lines = [line for line in printed if "File" in line and "nanovllm" not in line]
        where = lines[0].removeprefix("File ") if lines else "an unknown place"
        if time.monotonic() >= self.deadline:
            return f"your scheduler has taken more than {self.seconds} s in all"
        return f"your scheduler has not answered for {limit:g} s: it was in {where}"

    def _how_it_ended(self) -> str:
        self.process.wait(timeout=10)
        code = self.process.returncode
        reasons = {
            -signal.SIGXCPU: "it took too much time",
            -signal.SIGKILL: "it took too much memory or time",
        }
        return f"your process has ended by itself: {reasons.get(code, f'exit status {code}')}"

    def output(self) -> str:
        """What the student's file has printed, at most the last 4,000 bytes."""
        size = os.fstat(self.printed).st_size
        return os.pread(self.printed, 4000, max(0, size - 4000)).decode(errors="replace")

    def close(self) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        os.close(self.printed)
        self.directory.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Referee(Scheduler):
    """Carries out what a student's process decides, if it is allowed."""

    process: Process  # set by `referee_for`, as are these:
    block_manager_name: str | None
    max_steps: int

    def __init__(self, limits, block_manager):
        super().__init__(limits, block_manager)
        # what the process has not been told yet
        self.arrived = list[list]()
        self.tokens = dict[str, int]()
        self.requests = dict[str, Request]()  # unfinished
        self.num_steps, self.is_swapped = 0, False
        sizes = len(block_manager.blocks), block_manager.block_size
        blocks = [*sizes, block_manager.enable_prefix_caching, len(block_manager.host_ref_counts)]
        names = {"scheduler": type(self).__name__, "block_manager": self.block_manager_name}
        self.process.ask({**names, "limits": vars(limits), "blocks": blocks})

    def add(self, request: Request) -> None:
        super().add(request)
        self.requests[request.request_id] = request
        runs = [[token, len(list(group))] for token, group in groupby(request.prompt_token_ids)]
        when, params = [request.arrival, request.arrival_time], request.params
        self.arrived.append([request.request_id, *when, runs, params.max_tokens, params.extra_args])

    def schedule(self) -> Schedule:
        ended = [
            request_id for request_id, request in self.requests.items() if not request.unfinished
        ]
        for request_id in ended:
            del self.requests[request_id]
        news = {"now": self.clock(), "tokens": self.tokens, "ended": ended, "arrived": self.arrived}
        self.arrived, self.tokens, schedule = [], {}, Schedule()
        self.num_steps += 1
        try:
            if self.num_steps > self.max_steps:
                raise Broken(
                    f"after so many steps, {len(self.requests)} requests are still waiting for tokens"
                )
            for event in self.process.ask(news)["events"]:
                self._carry_out(schedule, *event)
        except Broken as error:
            raise Broken(f"step {self.num_steps}: {error}") from None
        except (TypeError, KeyError, ValueError) as error:
            raise Broken(
                f"step {self.num_steps}: your process has sent what is no decision: {error}"
            ) from error
        schedule.moves = self.block_manager.take_moves()
        schedule.num_used_blocks = self.block_manager.num_used_blocks
        self.num_swapped_blocks += len(schedule.moves.swaps_out)
        return schedule

    def _carry_out(
        self, schedule: Schedule, kind: str, request_id: str, value: object = None
    ) -> None:
        request = self.requests[request_id]
        (seq,) = request.unfinished
        if kind == "preempt":
            self.is_swapped = value is True
            self.preempt(request)
        elif kind == "admit":
            check_choice(self, "admit", request, self.waiting)
            self._require_room(self.block_manager.can_admit(request), request, "admitted")
            self.admit(request)
        elif kind == "compute":
            check_choice(self, "commit", request, self.running)
            if not is_int(value, 1, seq.num_missing_tokens):
                missing = f"{seq.num_missing_tokens} are missing"
                raise ScheduleError(
                    self, "commit", f"{request} is to compute {value} tokens, but {missing}"
                )
            items = [Item(seq, seq.num_computed_tokens, value)]
            self._require_room(self.block_manager.can_allocate(items), request, "given tokens")
            self.commit(items, schedule)
        else:
            raise ValueError(shown(kind))

    def _require_room(self, has_room: bool, request: Request, what: str) -> None:
        if not has_room:
            num_free = self.block_manager.num_free_blocks
            raise ScheduleError(
                self,
                "schedule",
                f"{request} is {what}, but needs more than the {num_free} free blocks",
            )

    def update(self, schedule: Schedule, token_ids: list[int], logprobs=None) -> None:
        self.tokens = {
            seq.request.request_id: token for seq, token in zip(schedule.sampled, token_ids)
        }
        super().update(schedule, token_ids, logprobs)

    def should_swap(self, request: Request) -> bool:
        return self.is_swapped


def referee_for(
    process: Process, scheduler: str, block_manager: str | None, max_steps: int
) -> type[Referee]:
    """A class for `simulate`. It has the name of the student's class, which stands in the
    messages."""
    fields = {"process": process, "block_manager_name": block_manager, "max_steps": max_steps}
    return type(scheduler, (Referee,), fields)
