"""AsyncLLM: an engine in a thread of its own, for a web server's event loop.

The thread owns the LLM. What the loop wants goes in through one queue; what is new comes out with
one call per step. A second thread turns bodies into requests: tokenizing may take longer than a
stream can wait.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, TypeVar

from nanovllm.engine import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.replies import Reply
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.sequence import Request
from nanovllm.streaming import Delta, Reader

logger = logging.getLogger(__name__)
T = TypeVar("T")
AT_A_TIME = 4  # streams that write before the loop looks for something else


class Busy(Exception):
    """Too many requests wait already."""


class Unavailable(Exception):
    """The engine takes no requests: it ends, or it has died."""


@dataclass(eq=False)
class Ticket:
    """One request of the engine. `index` says which of its call."""

    request: Request
    index: int
    call: Call
    is_streamed: bool
    reply: Reply | None = None
    reader: Reader | None = None


@dataclass
class News:
    """Of one request: what is new, or in the end the whole output or an error."""

    index: int
    deltas: list[Delta] = field(default_factory=list)
    output: RequestOutput | None = None  # has finished
    error: Exception | None = None


class Call:
    """The requests of one HTTP call, and what has come for them."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.num_open = 0  # requests without an end
        self.news: list[News] = []
        self.has_news = asyncio.Event()

    def put(self, news: News) -> None:
        self.news.append(news)
        self.has_news.set()
        if news.output is not None or news.error is not None:
            self.num_open -= 1

    @property
    def is_over(self) -> bool:
        """All has come, and has been taken."""
        return not (self.num_open or self.news)

    async def take(self) -> list[News]:
        """All that has come since the last time; waits for something."""
        await self.has_news.wait()
        self.has_news.clear()
        taken = self.news
        self.news = []
        return taken


class AsyncLLM:
    """For one event loop, whose thread calls all methods up to "in the engine's thread"."""

    def __init__(self, llm: LLM, max_waiting: int = 256):
        self.llm = llm
        self.max_waiting = max_waiting
        self.loop = asyncio.get_running_loop()
        self.open: set[Ticket] = set()  # those that have not ended
        self.is_draining = False
        self.questions: set[asyncio.Future] = set()  # without an answer
        self.end = ""  # why nobody answers any longer
        self.heard: deque[tuple[Ticket, News]] = deque()  # not yet dealt out
        self.inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        # a tokenizer cannot be shared by threads
        self.inputs = replace(llm.inputs, tokenizer=deepcopy(llm.tokenizer))
        self.preparing = ThreadPoolExecutor(1, "prepare")
        # of the engine's thread
        self.live: dict[Request, Ticket] = {}
        self.sampled: set[Request] = set()
        self.is_stopping = False
        self.on_idle: list[Callable[[], object]] = []
        llm.observers.append(self._observe)
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    async def prepare(self, function: Callable[..., T], *args) -> T:
        """Calls a function in the thread that may use `inputs`. Raises Unavailable."""
        self.check_open()
        try:
            return await self.loop.run_in_executor(self.preparing, function, *args)
        except asyncio.CancelledError:
            self.check_alive()  # by `close`
            raise

    def check_open(self) -> None:
        """Raises Unavailable."""
        self.check_alive()
        if self.is_draining:
            raise Unavailable("the server is shutting down")

    def submit(self, requests: list[Request], is_streamed: bool) -> Call:
        """Raises Unavailable or Busy. Whoever submits must also `leave`."""
        self.check_open()
        num_waiting = len(self.open) - len(self.llm.scheduler.running)
        if num_waiting + len(requests) > max(self.max_waiting, len(requests)):
            raise Busy(f"{num_waiting} requests wait already, at most {self.max_waiting} may")
        call = Call()
        for index, request in enumerate(requests):
            call.tickets.append(Ticket(request, index, call, is_streamed))
        call.num_open = len(requests)
        self.open.update(call.tickets)
        self.inbox.put(lambda: self._add(call.tickets))
        return call

    def leave(self, call: Call) -> None:
        """Nobody reads this call any longer: what it has not got ends."""
        left = self.open.intersection(call.tickets)
        if left:
            self.open -= left
            self.inbox.put(lambda: self._abort(left))

    async def ask(self, question: Callable[[], T]) -> T:
        """The answer of a function that must be called in the engine's thread. Raises
        Unavailable."""
        self.check_alive()
        future: asyncio.Future[T] = self.loop.create_future()
        self.questions.add(future)
        future.add_done_callback(self.questions.discard)

        def answer() -> None:
            try:
                self._tell(settle, future, question(), None)
            except Exception as error:
                self._tell(settle, future, None, error)

        self.inbox.put(answer)
        return await future

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
        self._end("the server is shutting down")
        self.inbox.put(self._stop)
        self.preparing.shutdown(cancel_futures=True)

    def _hear(self, batch: list[tuple[Ticket, News]]) -> None:
        """What the engine's thread has told."""
        self.heard.extend(batch)
        if len(self.heard) == len(batch):  # else it is being dealt out already
            self._deal_out()

    def _deal_out(self) -> None:
        """To a few calls at a time: between them the loop does what else there is."""
        for _ in range(min(AT_A_TIME, len(self.heard))):
            ticket, news = self.heard.popleft()
            if ticket not in self.open:
                continue  # its client has left
            if news.output is not None or news.error is not None:
                self.open.remove(ticket)
            ticket.call.put(news)
        if self.heard:
            self.loop.call_soon(self._deal_out)

    def _end(self, reason: str) -> None:
        """All who wait for something hear the reason."""
        self.end = self.end or reason
        error = Unavailable(self.end)
        self._hear([(ticket, News(ticket.index, error=error)) for ticket in self.open])
        for future in [*self.questions]:
            settle(future, None, error)

    # --- in the engine's thread ---

    def _run(self) -> None:
        try:
            while not self.is_stopping:
                self._read_inbox()
                if self.llm.has_unfinished():
                    self._step()
        except BaseException as error:
            logger.exception("the engine's thread has died")
            name = type(error).__name__
            self._tell(self._end, f"the engine has stopped ({name}); the server's log says more")
        finally:
            self.llm.observers.remove(self._observe)

    def _read_inbox(self) -> None:
        """Waits for something if there is nothing else to do."""
        if not self.llm.has_unfinished():
            for function in self.on_idle:
                function()
            self.inbox.get()()
        while not self.inbox.empty():
            self.inbox.get()()

    def _add(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            try:
                ticket.reply = self.llm._submit(ticket.request, is_reported=False)
            except Exception as error:
                self._tell(self._hear, [(ticket, News(ticket.index, error=error))])
                continue
            self.live[ticket.request] = ticket
            if ticket.is_streamed:
                ticket.reader = Reader(ticket.reply)

    def _abort(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if self.live.pop(ticket.request, None) is not None:
                self.llm.abort(ticket.request.request_id)

    def _stop(self) -> None:
        self._abort([*self.live.values()])
        self.is_stopping = True

    def _observe(self, schedule: Schedule, seconds: float) -> None:
        self.sampled = {seq.request for seq in schedule.sampled}

    def _step(self) -> None:
        self.sampled = set()
        failure: Exception | None = None
        try:
            self.llm.step(report=False)
        except ScheduleError as error:  # of the scheduler: all that runs has failed, not the engine
            failure = error
        if failure is not None or not self.llm.has_unfinished():
            self.llm._catch_up()
        batch = []
        for ticket in [*self.live.values()]:
            news = self._news_of(ticket, failure)
            if news is not None:
                batch.append((ticket, news))
        if batch:
            self._tell(self._hear, batch)

    def _news_of(self, ticket: Ticket, failure: Exception | None) -> News | None:
        assert ticket.reply is not None
        output = ticket.reply.output
        request = ticket.request
        if failure is not None and not output.finished:
            self._abort([ticket])
            return News(ticket.index, error=failure)
        if not output.finished and request not in self.sampled:
            return None
        news = News(ticket.index)
        if ticket.reader is not None:
            try:
                news.deltas = ticket.reader.news()
            except Exception as error:  # of the tokenizer: no other request is affected
                self._abort([ticket])
                return News(ticket.index, error=error)
        elif output.reply is not None:
            return None  # its text is made in the next step
        if output.finished:
            del self.live[request]
            news.output = output if output.error is None else None
            news.error = output.error
        return news

    def _tell(self, function: Callable[..., Any], *args) -> None:
        """Calls a function in the loop's thread."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self.is_stopping = True  # the loop is closed: nobody listens


def settle(future: asyncio.Future, result: object, error: Exception | None) -> None:
    if future.done():  # nobody waits any longer
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
