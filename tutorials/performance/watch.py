"""A watch in an event loop: how late does a task wake up, and what has kept it waiting?"""

import asyncio
import json
import sys
import time

from tutorials.report import percentile


class Watch:
    """A task that sleeps for a millisecond, again and again. What it notes is in seconds."""

    def __init__(self) -> None:
        self.late = [0.0]  # by how much it has woken up too late
        self.busy = [0.0]  # how long the loop's thread has computed meanwhile
        self.task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            before = time.perf_counter()
            computed = time.thread_time()
            await asyncio.sleep(0.001)
            self.busy.append(time.thread_time() - computed)
            self.late.append(time.perf_counter() - before - 0.001)

    def end(self) -> dict:
        self.task.cancel()
        numbers = {}
        for name, values in {"late": self.late, "busy": self.busy}.items():
            numbers[f"{name}_p99"] = percentile(values, 99)
            numbers[f"{name}_most"] = max(values)
        return numbers


async def serve_watch() -> None:
    """Answers "begin" and "end" from stdin, until it is closed; "end" with the numbers."""
    loop = asyncio.get_running_loop()
    watch: Watch | None = None
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        numbers = {}
        if line == "begin":
            watch = Watch()
        elif watch is not None:
            numbers = watch.end()
        print(json.dumps(numbers), flush=True)
