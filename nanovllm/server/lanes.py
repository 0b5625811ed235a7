"""Lanes: threads for work that takes longer than a stream may wait, such as tokenizing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from queue import SimpleQueue
from typing import TypeVar

from nanovllm.frontend.inputs import Inputs

T = TypeVar("T")


class Lane:
    """A thread with a tokenizer of its own: threads cannot share one.

    It ends with the process, in the middle of what it does.
    """

    def __init__(self, name: str, inputs: Inputs):
        self.inputs = replace(inputs, tokenizer=deepcopy(inputs.tokenizer))
        self.loop = asyncio.get_running_loop()
        self.jobs: SimpleQueue[tuple[asyncio.Future, Callable] | None] = SimpleQueue()
        self.waiting: set[asyncio.Future] = set()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def do(self, function: Callable[[Inputs], T]) -> T:
        """What the function makes of the inputs. If the caller is cancelled before it begins, it
        never does."""
        future: asyncio.Future[T] = self.loop.create_future()
        self.waiting.add(future)
        future.add_done_callback(self.waiting.discard)
        self.jobs.put((future, function))
        return await future

    def close(self, error: Exception) -> None:
        """All that wait get the error."""
        for future in [*self.waiting]:
            settle(future, None, error)
        self.jobs.put(None)

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            future, function = job
            if future.done():
                continue
            result: object = None
            error: Exception | None = None
            try:
                result = function(self.inputs)
            except Exception as caught:
                error = caught
            try:
                self.loop.call_soon_threadsafe(settle, future, result, error)
            except RuntimeError:  # the loop is closed
                return


def settle(future: asyncio.Future, result: object, error: Exception | None) -> None:
    if future.done():  # its caller has left
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
