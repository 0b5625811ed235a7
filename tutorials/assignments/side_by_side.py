"""Jobs side by side, each in a process of its own."""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tutorials.assignments.player import end_with_parent
from tutorials.assignments.problems import Broken, Kind

Work = Callable[[], Any]
Answer = tuple[Any, tuple | None]  # a result, or what `Broken` takes


class Job:
    """One that runs. By `fork`: what it works with needs not be pickled, only its result."""

    def __init__(self, work: Work):
        context = multiprocessing.get_context("fork")
        self.reader, writer = context.Pipe(duplex=False)
        self.process = context.Process(target=run, args=(work, writer))
        self.process.start()
        writer.close()
        self.answer: Answer = (None, (Kind.NO_TIME,))

    def finish(self) -> None:
        """Takes the result, which is there."""
        try:
            self.answer = self.reader.recv()
        except EOFError:
            self.answer = None, (Kind.GRADER_ENDED,)
        self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.reader.close()

    def result(self) -> Any:
        result, problem = self.answer
        if problem is not None:
            raise Broken(*problem)
        return result


def run(work: Work, writer: Connection) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that grades ends this one
    try:
        answer = work(), None
    except Exception as error:
        traceback.print_exc()
        sentence = f"{Kind.GRADER_FAILED.value}: {error!r}"
        answer = None, (Kind.GRADER_FAILED, sentence)
    writer.send(answer)


def in_order(works: Sequence[Work], deadline: float) -> Iterator[Work]:
    """The result of each, as a function that raises Broken if there is none. As many run at a
    time as there are processors, until `deadline` by time.monotonic()."""
    at_once = os.cpu_count() or 1
    jobs: list[Job] = []
    running: dict[Connection, Job] = {}
    try:
        for i in range(len(works)):
            while i >= len(jobs) or jobs[i] in running.values():
                while len(running) < at_once and len(jobs) < len(works):
                    job = Job(works[len(jobs)])
                    jobs.append(job)
                    running[job.reader] = job
                done = wait([*running], max(0.0, deadline - time.monotonic()))
                for reader in done:
                    running.pop(reader).finish()
                if not done:
                    end_all(running)
            yield jobs[i].result
    finally:
        end_all(running)


def end_all(running: dict[Connection, Job]) -> None:
    while running:
        _, job = running.popitem()
        job.end()
