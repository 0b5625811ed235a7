"""Streams: what a web server asks of an engine, wherever that is, and what comes back.

`engine.submit(requests)` makes a stream. `async for deltas in stream` brings what is new, until
each request has ended. `stream.close()` ends those that have not.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from nanovllm.decoding.structured import prepare_vocabulary
from nanovllm.frontend.inputs import Inputs
from nanovllm.frontend.outputs import CompletionOutput, RequestOutput
from nanovllm.sequence import Request
from nanovllm.server.errors import Busy, Unavailable

SHORT = 64 * 2**10  # bytes: what is longer does not let shorter texts wait
SECONDS_OF_SILENCE = 15.0  # then a reader is woken, though nothing has come
AT_A_TIME = 4  # streams that write before the loop looks for something else
SHUTTING_DOWN = "the server is shutting down"
T = TypeVar("T")


@dataclass
class Delta:
    """What is new of one request: parts of its outputs, and in the end the whole output or an
    error."""

    runs: bool = True  # else it waits for a place in a batch
    parts: list[CompletionOutput] = field(default_factory=list)
    output: RequestOutput | None = None  # has finished
    error: Exception | None = None
    gaps: list[float] | None = None  # seconds between its tokens, if it is not streamed
    index: int = 0  # which of its stream's requests

    @property
    def is_last(self) -> bool:
        return self.output is not None or self.error is not None


class Stream:
    """The requests of one HTTP call, and a queue of what has come for them."""

    def __init__(self, requests: list[Request], is_streamed: bool, leave: Callable):
        self.requests = requests
        self.is_streamed = is_streamed  # else only what comes last is of interest
        self.leave = leave
        self.clock: Any = None  # of `metrics`: it sees what is taken
        self.num_open = len(requests)  # those without an end
        self.deltas: list[Delta] = []
        self.has_more = asyncio.Event()
        self.outputs: list[Any] = [None] * len(requests)  # of requests that have ended
        self.error: Exception | None = None

    def put(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.num_open -= delta.is_last
        self.has_more.set()

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        """Brings all that has come since the last time, or nothing, after some seconds in which
        nothing came."""
        loop = asyncio.get_running_loop()
        while self.num_open or self.deltas:
            waking = loop.call_later(SECONDS_OF_SILENCE, self.has_more.set)
            try:
                await self.has_more.wait()
            finally:
                waking.cancel()
            self.has_more.clear()
            deltas = self.deltas
            self.deltas = []
            for delta in deltas:
                self.error = self.error or delta.error
                self.outputs[delta.index] = delta.output
                if self.clock is not None:
                    self.clock.see(delta)
            yield deltas

    def close(self) -> None:
        """Ends what has not ended: nothing more of it will be taken."""
        if self.num_open:
            self.leave(self)
        if self.clock is not None:
            self.clock.end(self)


def collected(jobs: SimpleQueue, pieces: Iterator[T]) -> asyncio.Future[list[T]]:
    """Has all pieces made in the thread that does these jobs. Between two of them it does others.
    If the future is cancelled, no more of them are made."""
    future: Future[list[T]] = Future()
    made: list[T] = []

    def job() -> None:
        if future.cancelled():
            return
        try:
            made.append(next(pieces))
            jobs.put(job)  # behind those that wait
        except Exception as error:
            if future.set_running_or_notify_cancel():
                is_over = isinstance(error, StopIteration)
                future.set_result(made) if is_over else future.set_exception(error)

    jobs.put(job)
    return asyncio.wrap_future(future)


class Lane:
    """A thread for work that takes longer than a stream may wait, with a tokenizer of its own:
    threads cannot share one. It ends with the process, in the middle of what it does."""

    def __init__(self, name: str, inputs: Inputs):
        self.inputs = replace(inputs, tokenizer=deepcopy(inputs.tokenizer))
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()


class Backend(ABC):
    """Serves streams, for one event loop: in a thread of its own (AsyncLLM) or in other processes
    (Replicas).

    Other threads turn bodies into requests: tokenizing may take longer than a stream can wait.
    """

    def __init__(self, inputs: Inputs, max_waiting: int, model_name: str = ""):
        self.max_waiting = max_waiting
        self.loop = asyncio.get_running_loop()
        self.inputs = replace(inputs, model=model_name or inputs.model)  # errors name no paths
        prepare_vocabulary(self.inputs)
        # for texts, for calls that need no model, and for what must be compiled
        self.lanes = [Lane(name, self.inputs) for name in ("short", "long", "told", "forms")]
        self.short, self.long, self.told, self.forms = self.lanes
        self.writing = Lane("writing", replace(self.inputs, tokenizer=None))  # large answers
        self.num_preparing = 0
        self.waiting: set[asyncio.Future] = set()  # of `unless_closed`
        self.open: dict[Request, tuple[Stream, int]] = {}  # requests that have not ended
        self.heard: deque[tuple[Request, Delta]] = deque()  # not yet dealt out
        self.is_draining = False
        self.end = ""  # why the engine answers no longer
        self.has_died = asyncio.Event()  # by itself

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """How many requests have been submitted and have no seat yet."""

    @abstractmethod
    def _begin(self, stream: Stream) -> None:
        """Has the requests computed. What is new of them goes to `_hear`."""

    @abstractmethod
    def _abort(self, requests: list[Request]) -> None:
        """Ends requests: nothing of them is heard any longer."""

    @abstractmethod
    async def stats(self) -> dict[str, float]:
        """Returns what `LLM.stats` does. Raises Unavailable."""

    @abstractmethod
    async def ended(self) -> None:
        """Waits, after `close`, until nothing of it runs."""

    async def prepare(self, lane: Lane, pieces: Iterator[T]) -> list[T]:
        """Has pieces made in a thread. Meanwhile they count as one request that waits. Raises
        Unavailable or Busy."""
        self.check_open()
        self.check_room(self.num_waiting + self.num_preparing)
        self.num_preparing += 1
        try:
            return await self.unless_closed(collected(lane.jobs, pieces))
        finally:
            self.num_preparing -= 1

    async def unless_closed(self, work: Awaitable[T]) -> T:
        """The result of the work. Raises Unavailable if the engine ends before."""
        future = asyncio.ensure_future(work)
        self.waiting.add(future)
        try:
            return await future
        except asyncio.CancelledError:
            self.check_alive()  # it was `_end`
            raise
        finally:
            self.waiting.discard(future)

    def submit(self, requests: list[Request], is_streamed: bool) -> Stream:
        """All of them are admitted, or none; any number if no other request waits. Raises
        Unavailable or Busy. The stream must be closed."""
        self.check_open()
        num_waiting = self.num_waiting
        self.check_room(num_waiting + len(requests) if num_waiting else 0)
        stream = Stream(requests, is_streamed, self.leave)
        self.open.update((request, (stream, i)) for i, request in enumerate(requests))
        self._begin(stream)
        return stream

    def leave(self, stream: Stream) -> None:
        left = [request for request in stream.requests if self.open.pop(request, None)]
        if left:
            self._abort(left)

    def _hear(self, batch: list[tuple[Request, Delta]]) -> None:
        """Takes in what is new."""
        self.heard.extend(batch)
        if len(self.heard) == len(batch):  # else it is being dealt out already
            self._deal_out()

    def _deal_out(self) -> None:
        """Deals deltas out to a few streams at a time: in between the loop does its other work."""
        for _ in range(min(AT_A_TIME, len(self.heard))):
            request, delta = self.heard.popleft()
            if request not in self.open:
                continue  # its client has left
            stream, delta.index = self.open[request]
            if delta.is_last:
                del self.open[request]
            stream.put(delta)
        if self.heard:
            self.loop.call_soon(self._deal_out)

    def check_room(self, num_waiting: int) -> None:
        """Raises Busy if so many requests may not wait."""
        if num_waiting > self.max_waiting:
            already = self.num_waiting + self.num_preparing
            raise Busy(f"{already} requests wait already, at most {self.max_waiting} may")

    def check_open(self) -> None:
        """Raises Unavailable."""
        if self.end or self.is_draining:
            raise Unavailable(self.end or SHUTTING_DOWN)

    def check_alive(self) -> None:
        if self.end:
            raise Unavailable(self.end)

    async def drain(self, seconds: float) -> None:
        """Takes no more requests, and gives those that run some time to end."""
        self.is_draining = True
        end = self.loop.time() + seconds
        while self.open and self.loop.time() < end:
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Ends all that is open, then the threads."""
        self._end(SHUTTING_DOWN)
        for lane in (*self.lanes, self.writing):
            lane.jobs.put(None)

    def _end(self, reason: str) -> None:
        """All that wait for something get the reason."""
        self.end = self.end or reason
        self._hear([(request, Delta(error=Unavailable(self.end))) for request in self.open])
        for future in self.waiting:
            future.cancel()
