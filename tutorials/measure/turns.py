"""Engines that are alive side by side, each in a process of its own, and compute in turns.

A machine is not equally fast all day. So engines are compared within a round, in which each of them
answers the same requests; another one begins in each round. The engine's side is in `worker`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from select import select
from statistics import fmean, median
from tempfile import TemporaryDirectory

from nanovllm.device.threads import busy_seconds
from tutorials.machine import ROOT, cpu_seconds
from tutorials.measure.engines import Job

WARM_UP = 2  # rounds: vLLM needs both, the others one at most
FEW = 3  # rounds with each number of first requests
REST = 2.0  # seconds at most until the other engines are at rest
# Seconds of silence between a wake-up and the round, so that each engine begins with its
# threads and processes awake.
SILENCE = 0.3
GRACE = 10  # seconds in which a worker may end by itself


def tokens_per_second(rounds: list[dict]) -> float:
    """Of the median round."""
    return median([sum(len(a[0]) for a in one["answers"]) / one["seconds"] for one in rounds])


class Worker:
    """The process of an engine, and what it has answered. `error` says why it is of no more use."""

    def __init__(self, python: str, job: Job, folder: Path):
        if not hasattr(os, "killpg"):
            raise ValueError("engines are compared on Linux or macOS: on Windows, run it in WSL")
        self.error: str | None = None
        self.facts: dict = {}
        self.rounds: list[dict] = []
        self.warm_up = WARM_UP
        self.few: dict[int, list[dict]] = {}  # rounds with the first requests only
        self.cpu_shares: list[float] = []  # in each of its turns: how many processors it used
        self.idle_cpu_shares: list[float] = []  # in each turn of the others
        self.log = folder / job.engine
        self.connection, theirs = socket.socketpair()
        self.pipe = self.connection.makefile()
        with theirs, self.log.open("w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                [python, "-m", "tutorials.measure.worker", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # what it starts can be ended with it
            )
        self.send(asdict(replace(job, started=time.time())))

    def send(self, message) -> None:
        with suppress(ConnectionError):  # there is no answer then
            self.connection.sendall(f"{json.dumps(message)}\n".encode())

    def ask(self, *question) -> dict:
        if self.error is not None:
            return {"error": self.error}
        self.send(question)
        return self.answer()

    def answer(self) -> dict:
        """Waits for a line. Without one the worker is ended, and `error` says why."""
        while not select([self.connection], [], [], 1)[0]:
            if self.process.poll() is not None:  # what it has started holds its end of the socket
                self.end(0)
        line = ""
        with suppress(ConnectionError):
            line = self.pipe.readline()
        answer = json.loads(line) if line.endswith("\n") else {"error": None}
        if "error" in answer:
            self.fail(answer["error"])
        return answer

    def fail(self, error: str | None) -> None:
        """Ends the worker. Unless it said why it failed, the last line of its log does."""
        self.end(GRACE)
        lines = [
            line
            for line in self.log.read_text(errors="replace", encoding="utf-8").splitlines()
            if line.strip()
        ]
        last_words = lines[-1] if lines else f"exit status {self.process.returncode}"
        self.error = error or last_words
        if self.error != "not installed":
            print(*lines[-100:], sep="\n", file=sys.stderr)

    def end(self, grace: float) -> None:
        """No more questions: the process has some seconds to end. Then what is left of it and of
        all that it started is killed."""
        with suppress(OSError):  # it is shut already
            self.connection.shutdown(socket.SHUT_WR)
        try:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        finally:  # also at a second Ctrl-C
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind, *_) -> None:
        self.end(GRACE if kind is None else 0)
        self.pipe.close()
        self.connection.close()

    def cpu_seconds(self) -> float:
        """0 where the system does not tell, and when the process has ended."""
        return cpu_seconds(self.process.pid) or 0.0

    def result(self) -> dict:
        if self.error is not None:
            return {"error": self.error}
        shares = {"cpu_share": self.cpu_shares, "idle_cpu_share": self.idle_cpu_shares}
        means = {name: fmean(values) for name, values in shares.items() if values}
        few = {count: tokens_per_second(rounds) for count, rounds in self.few.items()}
        rounds = {"warm_up": self.rounds[: self.warm_up], "runs": self.rounds[self.warm_up :]}
        return self.facts | means | rounds | {"few": few}


class Turns:
    """The engines that take part; the first one is ours. When the block ends, so do they."""

    def __init__(self, pythons: dict[str, str]):
        self.pythons = pythons  # where it is another one than this
        self.workers: dict[str, Worker] = {}
        self.foreign_shares: list[float] = []  # in each turn: processors that others used
        self.stack = ExitStack()

    def __enter__(self) -> "Turns":
        self.folder = Path(self.stack.enter_context(TemporaryDirectory()))  # for their logs
        return self

    def __exit__(self, *exception) -> None:
        self.stack.__exit__(*exception)

    def start(self, job: Job) -> dict:
        """Waits until the engine has answered a first tiny request. Returns what it tells."""
        python = self.pythons.get(job.engine, sys.executable)
        worker = self.stack.enter_context(Worker(python, job, self.folder))
        self.workers[job.engine] = worker
        worker.facts = worker.answer()
        self.check_ours()
        return worker.facts

    def play(
        self, num_rounds: int, warm_up: int = WARM_UP, few: Sequence[int] = ()
    ) -> Iterator[None]:
        """The rounds, some with only the first requests, and one more of ours, which is observed.
        Yields after each round that counts, and at the end."""
        num_rounds += warm_up
        for number in range(num_rounds):
            for name in self.order(number):
                answer = self.turn(name, "round", number)
                self.workers[name].rounds.append(answer)
                self.workers[name].warm_up = warm_up
            times = {name: worker.rounds[-1] for name, worker in self.alive().items()}
            print(
                f"round {number + 1} of {num_rounds}:",
                ", ".join(f"{name} {time['seconds']:.2f} s" for name, time in times.items()),
                file=sys.stderr,
            )
            if number >= warm_up:
                yield
        for number, count in enumerate([count for count in few for _ in range(FEW)], num_rounds):
            for name in self.order(number):
                answer = self.turn(name, "round", number, count)
                self.workers[name].few.setdefault(count, []).append(answer)
        ours = next(iter(self.workers))
        self.workers[ours].facts |= self.turn(ours, "observe", num_rounds + FEW * len(few))
        yield

    def order(self, number: int) -> list[str]:
        """Of the engines that are alive, in a round."""
        names = list(self.alive())
        first = number % len(names)
        return names[first:] + names[:first]

    def turn(self, name: str, *question) -> dict:
        """Wakes an engine on a quiet machine, asks, and notes which processes computed meanwhile."""
        worker = self.workers[name]
        self.rest([other for other in self.alive().values() if other is not worker])
        worker.ask("wake")
        time.sleep(SILENCE)
        before = {other: other.cpu_seconds() for other in self.alive().values()}
        busy_before = busy_seconds() or 0.0
        start = time.perf_counter()
        answer = worker.ask(*question)
        seconds = time.perf_counter() - start
        foreign = (busy_seconds() or 0.0) - busy_before
        for other in before:
            used = other.cpu_seconds() - before[other]
            shares = other.cpu_shares if other is worker else other.idle_cpu_shares
            shares.append(used / seconds)
            foreign -= used
        self.foreign_shares.append(max(0.0, foreign / seconds))
        self.check_ours()
        return answer

    def rest(self, others: list[Worker]) -> None:
        """Waits until they do not compute. Threads of OpenMP wait for work in a loop for some
        milliseconds, and processes of vLLM for each other for a second."""
        deadline = time.perf_counter() + REST
        is_busy = bool(others)
        while is_busy and time.perf_counter() < deadline:
            before = sum(other.cpu_seconds() for other in others)
            time.sleep(0.2)
            used = sum(other.cpu_seconds() for other in others) - before
            is_busy = used > 0.02 or before == 0  # 0: the system does not tell

    def alive(self) -> dict[str, Worker]:
        return {name: worker for name, worker in self.workers.items() if worker.error is None}

    def check_ours(self) -> None:
        """Raises ValueError if ours has failed: there is nothing to compare with."""
        name, worker = next(iter(self.workers.items()))
        if worker.error is not None:
            raise ValueError(f"{name}: {worker.error}")

    def results(self) -> dict[str, dict]:
        return {name: worker.result() for name, worker in self.workers.items()}
