"""Replicas: several engines behind one server, as deployments of Ray Serve.

`Ingress` has the routes of `app.py` and no model; `Engine` has a model and no routes. A request
goes from one to the other, its news come back as a stream. Who gets it, a Router says.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from pydoc import locate
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanovllm.engine import LLM
from nanovllm.frontend.inputs import Inputs
from nanovllm.options import shown
from nanovllm.router import Router
from nanovllm.schedule import check_choice
from nanovllm.sequence import Request
from nanovllm.server.app import Server, ServerOptions, app_of
from nanovllm.server.async_llm import AsyncLLM
from nanovllm.server.calls import Backend, Busy, Call, News, Ticket, Unavailable
from nanovllm.server.protocol import BadRequest
from nanovllm.server.responses import status_of

logger = logging.getLogger("ray.serve")
SECONDS_BETWEEN = 0.02  # parts of a stream: each costs Ray about a millisecond, on both sides
PAUSES = (0, 0.1, 0.3, 1, 3)  # seconds before each try to find a replica that answers


@dataclass
class Work:
    """A request on its way to a replica, with what a router must know of all replicas."""

    request: Request
    is_streamed: bool
    block_size: int
    num_blocks: int


class Engine:
    """A replica: an engine, and the thread that runs it."""

    async def __init__(self, config: dict[str, Any], max_waiting: int):  # type: ignore[misc]
        self.llm = LLM(**config)
        self.engine = AsyncLLM(self.llm, max_waiting)

    async def inputs(self) -> Inputs:
        """What turns prompts into requests, elsewhere."""
        return self.llm.inputs

    async def stats(self) -> dict[str, float]:
        return await self.engine.stats()

    async def check_health(self) -> None:
        """Ray asks for it each second, and replaces a replica that raises."""
        self.engine.check_alive()

    async def generate(self, work: Work) -> AsyncIterator[list[News]]:
        try:
            call = self.engine.submit([work.request], work.is_streamed)
        except (Busy, Unavailable) as error:
            yield [News(0, error=error)]
            return
        try:
            while not call.is_over:
                yield [sendable(news) for news in await call.take()]
                if not call.is_over:
                    await asyncio.sleep(SECONDS_BETWEEN)
        finally:  # also if Ray cancels this, because nobody reads it any longer
            self.engine.leave(call)


def sendable(news: News) -> News:
    """Makes an error that can be pickled: a client only gets its status and a sentence."""
    error = news.error
    if error is not None and not isinstance(error, Busy | Unavailable):
        status, message = status_of(error)
        news.error = BadRequest(message, status=status)
    return news


class Replicas(Backend):
    """Engines elsewhere. Each request is a task that reads its stream."""

    def __init__(self, engines: DeploymentHandle, inputs: Inputs):
        super().__init__(inputs)
        self.engines = engines
        self.manager = inputs.scheduler.block_manager  # as it was when the first one began
        self.tasks: dict[Ticket, asyncio.Future[None]] = {}

    @classmethod
    async def connect(cls, engines: DeploymentHandle) -> Replicas:
        """Waits for the first replica."""
        return cls(engines.options(stream=True), await engines.inputs.remote())

    def submit(self, requests: list[Request], is_streamed: bool) -> Call:
        self.check_open()
        call = Call(requests, is_streamed)
        self.open.update(call.tickets)
        for ticket in call.tickets:
            # in our context, Ray would take all requests of a call for the same one
            task = Context().run(asyncio.ensure_future, self._serve(ticket))
            task.add_done_callback(partial(self._forget, ticket))
            self.tasks[ticket] = task
        return call

    def _forget(self, ticket: Ticket, task: asyncio.Future[None]) -> None:
        self.open.discard(ticket)
        del self.tasks[ticket]

    def leave(self, call: Call) -> None:
        for ticket in self.open.intersection(call.tickets):
            self.tasks[ticket].cancel()

    async def stats(self) -> dict[str, float]:
        """The sums over all replicas."""
        answers = self.engines.broadcast("stats").results_async(return_exceptions=True)
        total: Counter[str] = Counter()
        for stats in await answers:
            if isinstance(stats, dict):  # else this replica is being replaced
                total.update(stats)
        return dict(total)

    def close(self) -> None:
        self.end = self.end or "the server is shutting down"
        for ticket in self.open:
            ticket.call.put(News(ticket.index, error=Unavailable(self.end)))
            self.tasks[ticket].cancel()
        super().close()

    async def ended(self) -> None:
        await self.engines.shutdown_async()

    async def _serve(self, ticket: Ticket) -> None:
        try:
            for pause in PAUSES:
                await asyncio.sleep(pause)
                if await self._is_served(ticket):
                    return
            raise Unavailable("no replica answers")
        except Exception as error:  # perhaps of the router
            ticket.call.put(News(ticket.index, error=error))

    async def _is_served(self, ticket: Ticket) -> bool:
        """Whether a replica has served the call. If no news has come, another one may try."""
        has_begun = False
        sizes = (self.manager.block_size, len(self.manager.blocks))
        work = Work(ticket.request, ticket.is_streamed, *sizes)
        stream = self.engines.generate.remote(work)
        try:
            async for batch in stream:
                for news in batch:
                    if isinstance(news.error, Unavailable) and not has_begun:
                        return False
                    has_begun = True
                    news.index = ticket.index
                    ticket.call.put(news)
        except RayError as error:
            logger.warning("a replica failed: %s", shown(error))
            if has_begun:
                raise Unavailable("the replica that answered has died") from error
        finally:
            stream.cancel()
        return has_begun


@serve.ingress()
class Ingress:
    """The server, as a deployment."""

    def __init__(self, engines: DeploymentHandle, options: ServerOptions):
        self.server = Server(partial(Replicas.connect, engines), options)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return app_of(self.server)


class RayRouter(RequestRouter):
    """Asks a Router. Ray makes one for each ingress."""

    def initialize_state(self, **kwargs) -> None:
        self.router_cls: Any = locate(kwargs["router"])
        self.router: Router | None = None
        self.loads: Counter[ReplicaID] = Counter()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self.loads[replica_id] += 1

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        """A request has ended."""
        super().decrement_queue_len_cache(replica_id)
        self.loads[replica_id] -= 1

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if it must be asked again
        works = [arg for arg in pending_request.args if isinstance(arg, Work)]
        if not works:  # a question that any of them can answer
            return [candidate_replicas]
        try:
            return [[self.choose(candidate_replicas, works[0])]]
        except Exception as error:  # Ray would log it, and let the client wait for ever
            pending_request.future.set_exception(error)
            return [candidate_replicas]

    def choose(self, replicas: list[RunningReplica], work: Work) -> RunningReplica:
        if self.router is None:
            self.router = self.router_cls(work.block_size, work.num_blocks)
        by_id = {replica.replica_id: replica for replica in replicas}
        loads = {replica_id: self.loads[replica_id] for replica_id in by_id}
        chosen = self.router.choose(work.request, loads)
        check_choice(self.router, "choose", chosen, [*by_id])
        return by_id[chosen]
