"""Serve: binds a port, serves an app, and ends in an orderly way."""

import gc
import logging
import socket
import sys
import time
from copy import deepcopy
from math import ceil
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from nanovllm.options import refusal
from nanovllm.topics.server.app import LOCAL

logger = logging.getLogger("uvicorn.error")
LONGEST_IDLE = 60.0  # seconds without a whole request, or without reading the answer
LONGEST_HEAD = 2**14  # bytes of headers or trailers
SWITCH = 0.0005  # seconds; by itself, Python lets a thread go on for ten times as long


def lacks_body(connection: Any) -> bool:
    """Whether the client has not sent all of its request's body."""
    cycle = connection.cycle
    return cycle is not None and cycle.more_body and not cycle.response_complete


class Server(uvicorn.Server):
    """uvicorn's server. At the first signal, it takes no more connections and gives the running
    requests some time. At the second signal, it ends at once."""

    has_failed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # connections that wait for a request, each with its last one: since when
        self.idle: dict[tuple, float] = {}
        await super().startup(sockets)  # loads the model; from now on, calls come
        self.routes = self.config.app.state.server  # type: ignore[union-attr]
        self.routes.engine.on_death = self.end_with_the_engine
        gc.collect()
        gc.freeze()  # the model stays: a look at all its objects takes a quarter of a second
        # PyTorch gives the interpreter back in each operation, and must not wait long to get it
        sys.setswitchinterval(SWITCH)
        for sock in sockets or ():
            sock.listen(2048)  # again: so many connections may wait until they are accepted
            host, port = sock.getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            options = self.routes.options
            model = options.served_model_name[0]
            logger.info("Serving %s at http://%s:%d (Ctrl-C ends it)", model, name, port)
            if not (is_local(host) or options.api_key):
                logger.warning("All that can reach %s may use it: --api-key asks for a key", host)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. Closes idle connections, also those that do not read their
        answer: uvicorn would keep one that sends a byte now and then."""
        now = time.monotonic()
        idle = {}
        connections: Any = self.server_state.connections
        for connection in connections:
            cycle = connection.cycle
            is_idle = cycle is None or cycle.response_complete
            if is_idle or lacks_body(connection) or connection.flow.write_paused:
                idle[connection, cycle] = self.idle.get((connection, cycle), now)
                if now - idle[connection, cycle] > LONGEST_IDLE:
                    connection.transport.abort()
        self.idle = idle
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: object) -> None:
        """Handles a signal. uvicorn would raise it again before the engine is closed."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def end_with_the_engine(self) -> None:
        """Ends the server when the engine dies, so that a supervisor can start it again."""
        self.has_failed = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.routes.live is not None:
            self.routes.live.close()  # watchers would stay forever
        connections: Any = self.server_state.connections
        for connection in connections:
            if lacks_body(connection):  # it may never come
                connection.transport.close()
        # what is cut gets an error that says so
        timeout = self.routes.options.shutdown_timeout
        self.routes.engine.loop.call_later(timeout, self.routes.engine.close)
        await super().shutdown(sockets)


def is_local(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at this address. No other server can take the address while the model
    loads. Raises ValueError."""
    if not 0 <= port < 2**16:
        raise refusal("port", port, "it must be from 0 (any free one) to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"host={host!r}, port={port}: {error.strerror}") from error


def new_server(app: FastAPI) -> Server:
    options = app.state.server.options
    log = deepcopy(LOGGING_CONFIG)
    log["formatters"]["default"]["fmt"] = "%(asctime)s %(levelprefix)s %(message)s"
    config = uvicorn.Config(
        app,
        log_config=log,
        access_log=False,  # app.py writes one
        use_colors=None if sys.stdout else False,  # it asks the terminal, if there is one
        loop="asyncio",  # uvloop does not log that there is no file left for a connection
        backlog=1,  # asyncio logs it for so many connections at once
        ws="none",
        http="h11",
        h11_max_incomplete_event_size=LONGEST_HEAD,
        log_level="info",
        timeout_graceful_shutdown=ceil(options.shutdown_timeout) + 1,
    )
    return Server(config)


def serve_app(app: FastAPI, sock: socket.socket) -> None:
    """Serves until a signal comes. Exits with 1 if the engine has died."""
    host = sock.getsockname()[0]
    if is_local(host) and not app.state.server.options.api_key:
        # a web page could give its own name this machine's address, and then call the server
        app.state.server.hosts = {*LOCAL, host}
    server = new_server(app)
    server.run(sockets=[sock])
    if server.has_failed:
        sys.exit(1)
