"""AsyncLLM: an engine in a thread of its own, for a web server's event loop.

The thread owns the LLM. What the loop wants goes in through one queue; what is new comes out with
one call per step.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from nanovllm.engine import LLM
from nanovllm.frontend.replies import Reply
from nanovllm.frontend.streaming import Reader
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.sequence import Request
from nanovllm.server.streams import Backend, Delta, Stream, collected

logger = logging.getLogger(__name__)
T = TypeVar("T")
SECONDS_OF_INBOX = 0.01  # between two steps: a call may have a thousand requests


class StreamReader(Reader):
    """Reads the reply to one request, and knows what has been told of it."""

    def __init__(self, reply: Reply, is_streamed: bool):
        super().__init__(reply)
        self.is_streamed = is_streamed
        self.times: list[float] = []  # of its tokens
        self.runs: bool | None = None  # whether it has a place in a batch; None: nothing was told
        self.ended: set[int] = set()  # outputs


class AsyncLLM(Backend):
    """All methods up to "in the engine's thread" belong to the thread of the event loop. Which
    requests run is only told if it `tells_places`: a server elsewhere must know it."""

    def __init__(
        self, llm: LLM, max_waiting: int = 256, model_name: str = "", tells_places: bool = False
    ):
        super().__init__(llm.inputs, max_waiting, model_name)
        self.llm = llm
        self.tells_places = tells_places
        self.inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        # of the engine's thread
        self.live: dict[Request, StreamReader] = {}
        self.sampled: set[Request] = set()
        self.is_stopping = False
        # on a GPU, deltas are made while it computes the next step
        self.is_late = llm.runner.is_asynchronous
        if self.is_late:
            llm.meanwhile.append(self._report)
        self.on_idle: list[Callable[[], object]] = []
        llm.observers.append(self._observe)
        self.thread = Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    @property
    def num_waiting(self) -> int:
        return max(0, len(self.open) - len(self.llm.scheduler.running))

    def _begin(self, stream: Stream) -> None:
        for request in stream.requests:
            self.inbox.put(partial(self._add, request, stream.is_streamed))

    def _abort(self, requests: list[Request]) -> None:
        self.inbox.put(partial(self._drop, requests))

    async def ask(self, question: Callable[[], T]) -> T:
        """The answer of a function that must be called in the engine's thread. Raises
        Unavailable."""
        self.check_alive()
        pieces = (ask() for ask in [question])
        (answer,) = await self.unless_closed(collected(self.inbox, pieces))
        return answer

    async def stats(self) -> dict[str, float]:
        return await self.ask(self.llm.stats)

    def close(self) -> None:
        super().close()
        self.inbox.put(self._stop)

    async def ended(self) -> None:
        await asyncio.to_thread(self.thread.join, 10)

    def _die(self, reason: str) -> None:
        self._end(reason)
        self.has_died.set()

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

    def _add(self, request: Request, is_streamed: bool) -> None:
        if request not in self.open:
            return  # its client has left
        try:
            reply = self.llm._submit(request, is_reported=False)
        except Exception as error:
            self._tell(self._hear, [(request, Delta(error=error))])
            return
        self.live[request] = StreamReader(reply, is_streamed)

    def _drop(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if self.live.pop(request, None) is not None:
                self.llm.abort(request.request_id)

    def _stop(self) -> None:
        self._drop([*self.live])
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
        for request, reader in [*self.live.items()]:
            if request in self.sampled:
                reader.times.append(now)
            delta = self._delta_of(request, reader, failure)
            if delta is not None:
                batch.append((request, delta))
            if delta is not None and delta.is_last:
                del self.live[request]
        if batch:
            self._tell(self._hear, batch)
        self.sampled = set()

    def _delta_of(
        self, request: Request, reader: StreamReader, failure: Exception | None
    ) -> Delta | None:
        output = reader.reply.output
        if failure is not None and not output.finished:
            self.llm.abort(request.request_id)
            return Delta(error=failure)
        runs = request.num_cached_tokens is not None  # it has begun to run, in some step
        is_news = self.tells_places and runs is not reader.runs and not output.finished
        reader.runs = runs
        if not output.finished and request not in self.sampled:
            return Delta(runs) if is_news else None
        delta = Delta()
        if reader.is_streamed:
            try:
                parts = reader.news()
            except Exception as error:  # of the tokenizer: no other request is affected
                self.llm.abort(request.request_id)
                return Delta(error=error)
            delta.parts = [one for one in parts if one.index not in reader.ended]
            reader.ended.update(one.index for one in parts if one.finish_reason is not None)
        elif not reader.reply.is_complete:
            return delta if is_news else None  # its text is made in the next step
        if output.finished:
            delta.output = output if output.error is None else None
            delta.error = output.error
            if not reader.is_streamed:
                delta.gaps = [after - before for before, after in pairwise(reader.times)]
        return delta

    def _tell(self, function: Callable[..., Any], *args) -> None:
        """Calls a function in the loop's thread."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self.is_stopping = True  # the loop is closed: no call listens
