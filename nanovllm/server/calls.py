"""Calls: what a web server asks of an engine, and what comes back; wherever the engine is."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from nanovllm.decoding.structured import prepare_vocabulary
from nanovllm.frontend.inputs import Inputs
from nanovllm.frontend.outputs import CompletionOutput, RequestOutput
from nanovllm.frontend.replies import Reply
from nanovllm.frontend.streaming import Reader
from nanovllm.sequence import Request
from nanovllm.server.lanes import Lane

SHORT = 64 * 2**10  # bytes: what is longer does not let shorter texts wait
SECONDS_OF_SILENCE = 15.0  # then a reader is woken, though nothing has come
T = TypeVar("T")


class Busy(Exception):
    """Too many requests wait already."""


class Unavailable(Exception):
    """The engine takes no requests: it ends, or it has died."""


@dataclass(eq=False)
class Ticket:
    """One request of an engine. `index` says which of its call."""

    request: Request
    index: int
    call: Call
    is_streamed: bool
    times: list[float] = field(default_factory=list)  # of its tokens; the first one, of `submit`
    runs: bool | None = None  # whether it has a place in a batch, or waits; None: not known yet
    reply: Reply | None = None
    reader: Reader | None = None


@dataclass
class News:
    """News of one request: what is new, or in the end the whole output or an error."""

    index: int
    runs: bool = True  # else it waits for a place in a batch
    deltas: list[CompletionOutput] = field(default_factory=list)
    output: RequestOutput | None = None  # has finished
    error: Exception | None = None
    gaps: list[float] = field(default_factory=list)  # seconds before each of the output's tokens

    @property
    def is_last(self) -> bool:
        return self.output is not None or self.error is not None


class Call:
    """The requests of one HTTP call, and what has come for them."""

    def __init__(self, requests: list[Request], is_streamed: bool):
        self.tickets = [Ticket(one, i, self, is_streamed) for i, one in enumerate(requests)]
        self.num_open = len(requests)  # those without an end
        self.news: list[News] = []
        self.has_news = asyncio.Event()

    def put(self, news: News) -> None:
        self.news.append(news)
        self.has_news.set()
        if news.is_last:
            self.num_open -= 1

    @property
    def is_over(self) -> bool:
        """All has come, and has been taken."""
        return not (self.num_open or self.news)

    async def take(self) -> list[News]:
        """All that has come since the last time; waits for something. Nothing, after some seconds
        in which nothing came."""
        waking = asyncio.get_running_loop().call_later(SECONDS_OF_SILENCE, self.has_news.set)
        try:
            await self.has_news.wait()
        finally:
            waking.cancel()
        self.has_news.clear()
        taken = self.news
        self.news = []
        return taken


class Backend(ABC):
    """Serves calls, for one event loop: in a thread of its own (AsyncLLM) or in other processes
    (Replicas).

    Other threads turn bodies into requests: tokenizing may take longer than a stream can wait.
    """

    def __init__(self, inputs: Inputs, max_waiting: int, model_name: str = ""):
        self.max_waiting = max_waiting
        self.loop = asyncio.get_running_loop()
        self.inputs = replace(inputs, model=model_name or inputs.model)  # errors name no paths
        prepare_vocabulary(self.inputs)
        self.short = Lane("short", self.inputs)
        self.long = Lane("long", self.inputs)
        self.num_preparing = 0
        self.open: set[Ticket] = set()  # those that have not ended
        self.is_draining = False
        self.end = ""  # why the engine answers no longer
        self.has_died = asyncio.Event()  # by itself

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """How many requests have been submitted and have no seat yet."""

    @abstractmethod
    def submit(self, requests: list[Request], is_streamed: bool) -> Call:
        """Raises Unavailable or Busy. After `submit`, `leave` must be called, too."""

    @abstractmethod
    def leave(self, call: Call) -> None:
        """Ends what the call has not got: its reader has left."""

    @abstractmethod
    async def stats(self) -> dict[str, float]:
        """Returns what `LLM.stats` does. Raises Unavailable."""

    @abstractmethod
    async def ended(self) -> None:
        """Waits, after `close`, until nothing of it runs."""

    async def prepare(self, num_bytes: int, function: Callable[[Inputs], T]) -> T:
        """Calls a function in a thread that may use its `inputs`. Meanwhile it counts as waiting.
        Raises Unavailable or Busy."""
        self.check_open()
        self.check_room(self.num_waiting + self.num_preparing)
        self.num_preparing += 1
        try:
            lane = self.short if num_bytes <= SHORT else self.long
            return await lane.do(function)
        finally:
            self.num_preparing -= 1

    def admit(self, requests: list[Request], is_streamed: bool) -> Call:
        """A call is admitted as a whole; if no request waits, with any number of requests. Raises
        Unavailable or Busy."""
        self.check_open()
        num_waiting = self.num_waiting
        self.check_room(num_waiting + len(requests) if num_waiting else 0)
        call = Call(requests, is_streamed)
        self.open.update(call.tickets)
        return call

    def check_room(self, num_waiting: int) -> None:
        """Raises Busy if so many requests may not wait."""
        if num_waiting > self.max_waiting:
            already = self.num_waiting + self.num_preparing
            raise Busy(f"{already} requests wait already, at most {self.max_waiting} may")

    def check_open(self) -> None:
        """Raises Unavailable."""
        self.check_alive()
        if self.is_draining:
            raise Unavailable("the server is shutting down")

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
        for lane in (self.short, self.long):
            lane.close(Unavailable(self.end or "the server is shutting down"))
