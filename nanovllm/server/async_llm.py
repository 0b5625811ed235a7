"""AsyncLLM: an engine in a thread of its own, for a web server's event loop.

The thread owns the LLM. What the loop wants goes in through one queue; what is new comes out with
one call per step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar

from nanovllm.engine import LLM
from nanovllm.frontend.streaming import Reader
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.sequence import Request
from nanovllm.server.calls import Backend, Call, News, Ticket, Unavailable
from nanovllm.server.lanes import settle

logger = logging.getLogger(__name__)
T = TypeVar("T")
AT_A_TIME = 4  # streams that write before the loop looks for something else
SECONDS_OF_INBOX = 0.01  # between two steps: a call may have a thousand requests


class AsyncLLM(Backend):
    """All methods up to "in the engine's thread" belong to the thread of the event loop. Which
    requests run is only news if it `tells_places`: a server elsewhere must know it."""

    def __init__(
        self,
        llm: LLM,
        max_waiting: int = 256,
        model_name: str = "",
        tells_places: bool = False,
    ):
        super().__init__(llm.inputs, max_waiting, model_name)
        self.llm = llm
        self.tells_places = tells_places
        self.questions: set[asyncio.Future] = set()  # without an answer
        self.heard: deque[tuple[Ticket, News]] = deque()  # not yet dealt out
        self.inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        # of the engine's thread
        self.live: dict[Request, Ticket] = {}
        self.sampled: set[Request] = set()
        self.is_stopping = False
        # on a GPU, news are made while it computes the next step
        self.is_late = llm.runner.is_asynchronous
        if self.is_late:
            llm.meanwhile.append(self._report)
        self.on_idle: list[Callable[[], object]] = []
        llm.observers.append(self._observe)
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    @property
    def num_waiting(self) -> int:
        return max(0, len(self.open) - len(self.llm.scheduler.running))

    def submit(self, requests: list[Request], is_streamed: bool) -> Call:
        call = self.admit(requests, is_streamed)
        now = time.perf_counter()
        for ticket in call.tickets:
            ticket.times.append(now)
            self.inbox.put(partial(self._add, ticket))
        return call

    def leave(self, call: Call) -> None:
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

    async def stats(self) -> dict[str, float]:
        return await self.ask(self.llm.stats)

    def close(self) -> None:
        self._end("the server is shutting down")
        self.inbox.put(self._stop)
        super().close()

    async def ended(self) -> None:
        await asyncio.to_thread(self.thread.join, 10)

    def _hear(self, batch: list[tuple[Ticket, News]]) -> None:
        """What the engine's thread has told."""
        self.heard.extend(batch)
        if len(self.heard) == len(batch):  # else it is being dealt out already
            self._deal_out()

    def _deal_out(self) -> None:
        """Deals news out to a few calls at a time: between them the loop does its other work."""
        for _ in range(min(AT_A_TIME, len(self.heard))):
            ticket, news = self.heard.popleft()
            if ticket not in self.open:
                continue  # its client has left
            if news.is_last:
                self.open.remove(ticket)
            ticket.call.put(news)
        if self.heard:
            self.loop.call_soon(self._deal_out)

    def _die(self, reason: str) -> None:
        self._end(reason)
        self.has_died.set()

    def _end(self, reason: str) -> None:
        """All that wait for something get the reason."""
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
            self._report_what_is_whole()
            name = type(error).__name__
            self._tell(self._die, f"the engine has stopped ({name}); the server's log says more")
        finally:
            self.llm.observers.remove(self._observe)
            if self.is_late:
                self.llm.meanwhile.remove(self._report)

    def _read_inbox(self) -> None:
        """Waits for something if there is nothing else to do."""
        if not self.llm.has_unfinished():
            for function in self.on_idle:
                function()
            self.inbox.get()()
        end = time.perf_counter() + SECONDS_OF_INBOX
        while not self.inbox.empty() and time.perf_counter() < end:
            self.inbox.get()()

    def _add(self, ticket: Ticket) -> None:
        try:
            ticket.reply = self.llm._submit(ticket.request, is_reported=False)
        except Exception as error:
            self._tell(self._hear, [(ticket, News(ticket.index, error=error))])
            return
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
        failure: Exception | None = None
        try:
            self.llm.step(report=False)
        except ScheduleError as error:  # of the scheduler: all that runs has failed, not the engine
            failure = error
        is_last = failure is not None or not self.llm.has_unfinished()
        if is_last:
            self.llm.replies.catch_up()
        if is_last or not self.is_late:
            self._report(failure)

    def _report_what_is_whole(self) -> None:
        """Answers that were complete before the step that failed are still given."""
        try:
            self.llm.replies.catch_up()
            self._report()
        except Exception:
            logger.exception("the last answers could not be made")

    def _report(self, failure: Exception | None = None) -> None:
        """Tells the loop what is new since the last call."""
        batch = []
        now = time.perf_counter()
        for request in self.sampled & self.live.keys():
            self.live[request].times.append(now)
        for ticket in [*self.live.values()]:
            news = self._news_of(ticket, failure)
            if news is not None:
                batch.append((ticket, news))
        if batch:
            self._tell(self._hear, batch)
        self.sampled = set()

    def _news_of(self, ticket: Ticket, failure: Exception | None) -> News | None:
        assert ticket.reply is not None
        output = ticket.reply.output
        request = ticket.request
        if failure is not None and not output.finished:
            self._abort([ticket])
            return News(ticket.index, error=failure)
        runs = request.num_cached_tokens is not None  # it has begun to run, in some step
        is_new = self.tells_places and runs is not ticket.runs and not output.finished
        ticket.runs = runs
        if not output.finished and request not in self.sampled:
            return News(ticket.index, runs) if is_new else None
        news = News(ticket.index)
        if ticket.reader is not None:
            try:
                news.deltas = ticket.reader.news()
            except Exception as error:  # of the tokenizer: no other request is affected
                self._abort([ticket])
                return News(ticket.index, error=error)
        elif not ticket.reply.is_complete:
            return news if is_new else None  # its text is made in the next step
        if output.finished:
            del self.live[request]
            news.output = output if output.error is None else None
            news.error = output.error
            news.gaps = [after - before for before, after in pairwise(ticket.times)]
        return news

    def _tell(self, function: Callable[..., Any], *args) -> None:
        """Calls a function in the loop's thread."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self.is_stopping = True  # the loop is closed: nobody listens
