"""AsyncLLM: an engine in a thread of its own, for the event loop of a web server. The thread owns
the LLM. Requests go in through one queue, the inbox. After each step, one call to the event loop
brings what is new in all requests."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from nanovllm.engine import LLM
from nanovllm.processing.inputs import Inputs
from nanovllm.processing.outputs import CompletionOutput, RequestOutput
from nanovllm.processing.states import Reader, RequestState
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.sequence import Request
from nanovllm.topics.server.errors import Refused, Unavailable, failed

logger = logging.getLogger(__name__)
SHUTTING_DOWN = "the server is shutting down"
MOST_OUTPUTS = 256  # of a call
LONGEST_SILENCE = 5.0  # seconds of a stream: proxies end a connection that says nothing
MOST_UNREAD = 2**13  # tokens of a call that its client has not read: about 20 MB


@dataclass
class Delta:
    """What is new in one request: parts of its outputs, and at the end the whole output. Without
    both, the request is still there."""

    parts: list[CompletionOutput] = field(default_factory=list)
    output: RequestOutput | None = None
    times: list[float] = field(default_factory=list)  # of its steps, if it is not streamed
    first_step: float = 0.0  # when it began, if there is an output


News = list[tuple[Request, Delta | Refused]]


def num_outputs(requests: Iterable[Request]) -> int:
    return sum(request.params.n for request in requests)


class Backend(ABC):
    """Serves requests for one event loop: in a thread (AsyncLLM) or in other processes (Replicas).
    All methods belong to the thread of the event loop."""

    def __init__(self, inputs: Inputs, max_waiting: int):
        self.inputs = inputs
        self.max_waiting = max_waiting
        self.loop = asyncio.get_running_loop()
        # requests that have not ended: the queue of their call, and which of its requests they are
        self.open: dict[Request, tuple[asyncio.Queue, int]] = {}
        # calls whose requests are not made yet, by client
        self.preparing: Counter[str] = Counter()
        self.end = ""  # why the engine no longer answers
        self.on_death: Callable[[], object] = lambda: None

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """How many outputs do not run yet. A call whose requests are not made yet counts as one."""

    @abstractmethod
    def _start(self, request: Request, is_streamed: bool) -> None:
        """Starts the request. Its Deltas go to `_deliver`."""

    @abstractmethod
    def _abort(self, requests: list[Request]) -> None:
        """Aborts requests."""

    @abstractmethod
    async def stats(self) -> dict[str, float]:
        """Returns the numbers of `LLM.stats`."""

    @abstractmethod
    async def ended(self) -> None:
        """After `close`, waits until nothing runs any longer."""

    async def stream(
        self, requests: list[Request], is_streamed: bool = True
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yields (index of the request, Delta) until all requests have ended. Closing the generator
        aborts the others. Without `is_streamed`, only the last Delta of each request comes. Raises
        Refused, also if a request fails."""
        self.check_open()
        self.check_room(num_outputs(requests), requests[0].client)
        num_open = len(requests)
        news = self.opened(requests, is_streamed)
        beating = asyncio.ensure_future(self.beat(news))
        try:
            while num_open:
                i, delta = await news.get()
                if isinstance(delta, Refused):
                    raise delta
                num_open -= delta.output is not None
                yield i, delta
        finally:
            beating.cancel()
            self.leave(requests)

    async def beat(self, news: asyncio.Queue) -> None:
        """Puts an empty Delta into the queue every few seconds."""
        while True:
            await asyncio.sleep(LONGEST_SILENCE)
            news.put_nowait((0, Delta()))

    def opened(self, requests: list[Request], is_streamed: bool) -> asyncio.Queue:
        """Starts these requests and returns the queue for their Deltas."""
        news: asyncio.Queue[tuple[int, Delta | Refused]] = asyncio.Queue()
        for i, request in enumerate(requests):
            self.open[request] = (news, i)
            self._start(request, is_streamed)
        return news

    def leave(self, requests: list[Request]) -> None:
        """Aborts the requests of this queue that have not ended: nothing reads it any longer."""
        left = [request for request in requests if self.open.pop(request, None)]
        if left:
            self._abort(left)

    def _deliver(self, news: News) -> None:
        for request, delta in news:
            if request not in self.open:
                continue  # its client has left
            queue, i = self.open[request]
            if isinstance(delta, Refused) or delta.output is not None:
                del self.open[request]
            queue.put_nowait((i, delta))
            if queue.qsize() * request.params.n > MOST_UNREAD:
                self.give_up(queue)

    def give_up(self, queue: asyncio.Queue) -> None:
        """Ends a call whose client does not read, and forgets what it has not read."""
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait((0, Refused("the client does not read the stream", status=408)))
        self.leave([request for request, (news, _) in self.open.items() if news is queue])

    def check_open(self) -> None:
        """Raises Unavailable if the engine takes no requests."""
        if self.end:
            raise Unavailable(self.end)

    def check_room(self, num_new: int, client: str) -> None:
        """Raises Refused if too many requests wait; each of `n` outputs counts. If none waits, a
        call may have more. A client of which none waits may add a call to a full queue, until
        twice as many wait."""
        if num_new > MOST_OUTPUTS:
            allowed = f"at most {MOST_OUTPUTS} are allowed in one call"
            raise Refused(f"the call asks for {num_new:,} outputs, {allowed}", "n")
        num_waiting = self.num_waiting
        has_some = any(request.is_new for request in self.open if request.client == client)
        most = self.max_waiting * (1 if has_some or self.preparing[client] else 2)
        if num_waiting and num_waiting + num_new > most:
            problem = f"{num_waiting} requests wait already, at most {self.max_waiting} may"
            raise Refused(problem, status=429)

    def close(self) -> None:
        self._end(SHUTTING_DOWN)

    def _end(self, reason: str) -> None:
        """Fails each open request with this reason."""
        self.end = self.end or reason
        self._deliver([(request, Unavailable(self.end)) for request in [*self.open]])


class StreamReader(Reader):
    """Reads the state of one request and remembers what has been sent."""

    def __init__(self, state: RequestState, is_streamed: bool):
        super().__init__(state)
        self.is_streamed = is_streamed
        self.times: list[float] = []
        self.first_step = 0.0  # when it began
        self.ended: set[int] = set()  # outputs


class AsyncLLM(Backend):
    def __init__(self, llm: LLM, max_waiting: int = 256):
        super().__init__(llm.inputs, max_waiting)
        self.llm = llm
        self.inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.on_idle: list[Callable[[], object]] = []
        # of the engine's thread
        self.live: dict[Request, StreamReader] = {}
        self.sampled: set[Request] = set()
        self.is_stopping = False
        llm.observers.append(self._observe)
        self.thread = Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    @property
    def num_waiting(self) -> int:
        num_running = num_outputs([*self.llm.scheduler.running])
        return max(0, num_outputs(self.open) - num_running) + self.preparing.total()

    def _start(self, request: Request, is_streamed: bool) -> None:
        self.inbox.put(partial(self._add, request, is_streamed))

    def _abort(self, requests: list[Request]) -> None:
        self.inbox.put(partial(self._drop, requests))

    async def stats(self) -> dict[str, float]:
        self.check_open()

        def between_steps() -> dict[str, float]:
            with self.llm.turns.take():
                requests = self.llm.requests.values()
                num_running = sum(one.most_sequences for one in self.llm.scheduler.running)
                num_waiting = sum(one.most_sequences for one in requests) - num_running
                counts = {"outputs_running": num_running, "outputs_waiting": num_waiting}
                return self.llm.stats() | counts

        return await asyncio.to_thread(between_steps)

    def close(self) -> None:
        super().close()
        self.inbox.put(self._stop)

    async def ended(self) -> None:
        await asyncio.to_thread(self.thread.join, 10)

    def _die(self, reason: str) -> None:
        self._end(reason)
        self.on_death()

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
            self._tell(self._die, f"the engine has stopped ({name}); the server's log says more")
        finally:
            self.llm.observers.remove(self._observe)

    def _read_inbox(self) -> None:
        """Takes requests and aborts from the inbox. It waits if no request runs."""
        if not self.llm.has_unfinished() and not self.is_stopping:
            for function in self.on_idle:
                function()
            self.inbox.get()()
        while not self.inbox.empty():
            self.inbox.get()()

    def _add(self, request: Request, is_streamed: bool) -> None:
        if request not in self.open:
            return  # its client has left
        try:
            state = self.llm._submit(request, is_reported=False)
        except Exception as error:
            self._tell(self._deliver, [(request, failed(error))])
            return
        self.live[request] = StreamReader(state, is_streamed)

    def _drop(self, requests: list[Request]) -> None:
        for request in requests:
            if self.live.pop(request, None) is not None:
                self.llm.abort(request.request_id)

    def _stop(self) -> None:
        self._drop([*self.live])
        self.is_stopping = True

    def _observe(self, schedule: Schedule, seconds: float) -> None:
        self.sampled = {seq.request for seq in schedule.sampled}
        begin = time.perf_counter() - seconds
        for seq, _, _ in schedule.items:
            reader = self.live.get(seq.request)
            if reader is not None:
                reader.first_step = reader.first_step or begin

    def _step(self) -> None:
        try:
            self.llm.step(report=False)
        except ScheduleError as error:  # of a user's scheduler: all that runs fails, the engine not
            news: News = [(request, failed(error)) for request in self.live]
            self._drop([*self.live])
            self._tell(self._deliver, news)
            return
        self._report()

    def _report(self) -> None:
        """Sends the event loop what is new since the last call."""
        news: News = []
        now = time.perf_counter()
        for request, reader in [*self.live.items()]:
            is_sampled = request in self.sampled
            if is_sampled:
                reader.times.append(now)
            has_ended = self.llm.states.of(request) is None
            if not (has_ended or (is_sampled and reader.is_streamed)):
                continue  # an answer that is not streamed is made once, at its end
            delta = self._delta_of(reader)
            news.append((request, delta))
            if isinstance(delta, Refused) or delta.output is not None:
                del self.live[request]
        if news:
            self._tell(self._deliver, news)
        self.sampled = set()

    def _delta_of(self, reader: StreamReader) -> Delta | Refused:
        output = reader.state.output
        delta = Delta()
        if not reader.is_streamed:
            reader.state.final_output()
        else:
            try:
                parts = reader.news()
            except Exception as error:  # of the tokenizer: no other request is affected
                self.llm.abort(output.request_id)
                return failed(error)
            delta.parts = [one for one in parts if one.index not in reader.ended]
            reader.ended.update(one.index for one in parts if one.finish_reason is not None)
        if output.error is not None:
            return failed(output.error)
        if output.finished:
            delta.output = output
            delta.times = [] if reader.is_streamed else reader.times
            delta.first_step = reader.first_step
        return delta

    def _tell(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls a function in the thread of the event loop."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self.is_stopping = True  # the loop is closed: no call listens
