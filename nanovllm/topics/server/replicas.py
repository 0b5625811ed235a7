"""Replicas: several engines behind one server, as deployments of Ray Serve. A request goes from the
server to an Engine, and its Deltas come back as a stream. A Router chooses the replica. The server
limits how many requests wait in all replicas together; a replica takes each one that it gets."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextvars import Context
from dataclasses import dataclass
from pydoc import locate
from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanovllm.engine import LLM
from nanovllm.options import shown
from nanovllm.processing.inputs import Inputs
from nanovllm.schedule import check_choice
from nanovllm.sequence import Request
from nanovllm.topics.decoding.rules import rules_of
from nanovllm.topics.routing.router import Router
from nanovllm.topics.server.app import Server, app_of
from nanovllm.topics.server.async_llm import AsyncLLM, Backend, Delta, num_outputs
from nanovllm.topics.server.errors import Refused, Unavailable, failed
from nanovllm.topics.server.metrics import is_counter
from nanovllm.topics.server.settings import ServerOptions

logger = logging.getLogger("ray.serve")
SECONDS_BETWEEN = 0.02  # parts of a stream: each costs Ray about a millisecond, on both sides
PAUSES = (0, 0.1, 0.3, 1, 3)  # seconds before each try to find a replica that answers
NO_LIMIT = 10**6  # of requests in a replica: the server says when there are too many


@dataclass
class Work:
    """A request on its way to a replica, and what the router must know of it."""

    request: Request
    is_streamed: bool
    block_size: int
    num_blocks: int
    is_over: bool = False  # the server reads no more of it


class Engine:
    """A replica: an engine and its thread."""

    async def __init__(self, config: dict[str, Any]):  # type: ignore[misc]
        self.llm = LLM(**config)
        self.engine = AsyncLLM(self.llm, NO_LIMIT)
        self.id = uuid4().hex  # Ray's answers do not say which replica gave them

    async def inputs(self) -> Inputs:
        """What the server needs to turn prompts into requests."""
        return self.llm.inputs

    async def stats(self) -> tuple[str, dict[str, float]]:
        """The replica's id, and its statistics."""
        return self.id, await self.engine.stats()

    async def check_health(self) -> None:
        """Ray calls this each second. It replaces a replica in which this raises."""
        self.engine.check_open()

    async def generate(self, work: Work) -> AsyncIterator[list[Delta | Refused]]:
        request = work.request
        if self.engine.end:
            yield [Unavailable(self.engine.end)]
            return
        if request.params.structured_outputs:  # its grammar did not travel
            request.rules = rules_of(request, self.engine.inputs)
        news = self.engine.opened([request], work.is_streamed)
        try:
            while request in self.engine.open or not news.empty():
                deltas = [(await news.get())[1]]
                while not news.empty():
                    deltas.append(news.get_nowait()[1])
                yield deltas
                if request in self.engine.open:
                    await asyncio.sleep(SECONDS_BETWEEN)
        finally:  # also if Ray cancels this task because its client has left
            self.engine.leave([request])


class Replicas(Backend):
    """The engines as a Backend. Each request has a task that reads its stream."""

    def __init__(
        self, engines: DeploymentHandle, inputs: Inputs, num_replicas: int, max_waiting: int
    ):
        super().__init__(inputs, max_waiting)
        self.engines = engines
        self.manager = inputs.scheduler.block_manager  # as it was when the first replica started
        self.most_running = num_replicas * inputs.scheduler.max_num_seqs
        self.tasks: dict[Request, asyncio.Future[None]] = {}
        self.counted: dict[str, dict[str, float]] = {}  # of each replica, also ended ones

    @property
    def num_waiting(self) -> int:
        """The requests beyond the places in all batches: no replica says which of them run."""
        return max(0, num_outputs(self.open) + self.preparing.total() - self.most_running)

    def _start(self, request: Request, is_streamed: bool) -> None:
        # in our context, Ray would take all requests of a call for the same one
        task = Context().run(asyncio.ensure_future, self._serve(request, is_streamed))
        task.add_done_callback(lambda _: self.tasks.pop(request, None))
        self.tasks[request] = task

    def _abort(self, requests: list[Request]) -> None:
        for request in requests:
            if request in self.tasks:
                self.tasks[request].cancel()

    async def stats(self) -> dict[str, float]:
        """Gauges are sums over the replicas that answer. Counters are sums over all replicas, also
        those that have ended: they never go back."""
        asked = self.engines.broadcast("stats")
        try:
            answers = await asked.results_async(return_exceptions=True)
        except DeploymentUnavailableError:  # all replicas are being replaced
            answers = []
        total: Counter[str] = Counter()
        for answer in answers:
            if isinstance(answer, tuple):  # else this replica is being replaced
                replica_id, stats = answer
                counters = filter(is_counter, [*stats])
                self.counted[replica_id] = {key: stats.pop(key) for key in counters}
                total.update(stats)
        for counts in self.counted.values():
            total.update(counts)
        return dict(total)

    def close(self) -> None:
        super().close()
        for task in self.tasks.values():
            task.cancel()

    async def ended(self) -> None:
        await self.engines.shutdown_async()

    async def _serve(self, request: Request, is_streamed: bool) -> None:
        try:
            for pause in PAUSES:
                await asyncio.sleep(pause)
                if await self._is_served(request, is_streamed):
                    return
            raise Unavailable("no replica answers")
        except Exception as error:  # perhaps of the router
            self._deliver([(request, failed(error))])

    async def _is_served(self, request: Request, is_streamed: bool) -> bool:
        """Whether a replica has answered. If no part has come, another one may be tried."""
        has_begun = False
        sizes = (self.manager.block_size, len(self.manager.blocks))
        work = Work(request, is_streamed, *sizes)
        stream = self.engines.generate.remote(work)
        try:
            async for deltas in stream:
                for delta in deltas:
                    if isinstance(delta, Unavailable) and not has_begun:
                        return False
                    has_begun = True
                    self._deliver([(request, delta)])
        except RayError as error:
            logger.warning("a replica failed: %s", shown(error))
            if has_begun:
                raise Unavailable("the replica that answered has died") from error
        finally:
            work.is_over = True
            stream.cancel()
        return has_begun


def new_ingress(engines: DeploymentHandle, num_replicas: int, options: ServerOptions) -> FastAPI:
    """The app of a server whose engines are in other processes. It has no page."""

    async def new_engine() -> Backend:
        inputs = await engines.inputs.remote()  # of the first replica
        return Replicas(engines.options(stream=True), inputs, num_replicas, options.max_waiting)

    return app_of(Server(new_engine, options))


class RayRouter(RequestRouter):
    """Asks a Router which replica gets a request. Ray makes one RayRouter for each ingress."""

    def initialize_state(self, **kwargs) -> None:
        self.router_cls: Any = locate(kwargs["router"])
        self.router: Router | None = None
        # of each open request, from the choice on: Ray calls `on_request_routed` only when it has
        # sent the request, and chooses for other requests in between
        self.chosen: dict[str, tuple[ReplicaID, Work]] = {}

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray when a request has ended, with an answer or with an error."""
        self.chosen.pop(internal_request_id, None)

    def loads(self, replicas: Iterable[ReplicaID]) -> dict[ReplicaID, int]:
        """How many open requests each replica has. Ray does not call on_request_completed if a
        client leaves before its request was sent."""
        self.chosen = {key: one for key, one in self.chosen.items() if not one[1].is_over}
        counts = Counter(replica_id for replica_id, _ in self.chosen.values())
        return {replica_id: counts[replica_id] for replica_id in replicas}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # for a second try
        works = [arg for arg in pending_request.args if isinstance(arg, Work)]
        if not works:  # any replica can answer this call
            return [candidate_replicas]
        try:
            chosen = self.choose(candidate_replicas, works[0])
            key = pending_request.metadata.internal_request_id
            self.chosen[key] = (chosen.replica_id, works[0])
            return [[chosen]]
        except Exception as error:  # else Ray only logs it, and the client waits
            pending_request.future.set_exception(error)
            return [candidate_replicas]

    def choose(self, replicas: list[RunningReplica], work: Work) -> RunningReplica:
        if self.router is None:
            self.router = self.router_cls(work.block_size, work.num_blocks)
        by_id = {replica.replica_id: replica for replica in replicas}
        chosen = self.router.choose(work.request, self.loads(by_id))
        check_choice(self.router, "choose", chosen, [*by_id])
        return by_id[chosen]
