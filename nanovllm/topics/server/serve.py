"""Serve: binds a port, serves an app, and ends in an orderly way."""

import gc
import logging
import socket
import sys
import time
from math import ceil
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from nanovllm.options import refusal

logger = logging.getLogger("uvicorn.error")
LOCAL = ("localhost", "127.0.0.1", "[::1]")
LONGEST_IDLE = 60.0  # seconds of a connection without a whole request
SWITCH = 0.0005  # seconds; by itself, Python lets a thread go on for ten times as long


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
            host, port = sock.getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            options = self.routes.options
            model = options.served_model_name[0]
            logger.info("Serving %s at http://%s:%d (Ctrl-C ends it)", model, name, port)
            if not (is_local(host) or options.api_key):
                logger.warning("All that can reach %s may use it: --api-key asks for a key", host)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. Closes idle connections: uvicorn would keep one that sends a
        byte now and then."""
        now = time.monotonic()
        idle = {}
        connections: Any = self.server_state.connections
        for connection in connections:
            cycle = connection.cycle
            if cycle is None or cycle.response_complete or cycle.more_body:
                idle[connection, cycle] = self.idle.get((connection, cycle), now)
                if now - idle[connection, cycle] > LONGEST_IDLE:
                    connection.transport.abort()
        self.idle = idle
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: object) -> None:
        """Handles a signal. uvicorn's own method would raise the signal again before the engine is
        closed."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def end_with_the_engine(self) -> None:
        """Ends the server when the engine dies, so that a supervisor can start it again."""
        self.has_failed = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.routes.live is not None:
            self.routes.live.close()  # watchers would stay forever
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
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"host={host!r}, port={port}: {error.strerror}") from error


def new_server(app: FastAPI) -> Server:
    options = app.state.server.options
    config = uvicorn.Config(
        app,
        access_log=options.log_requests,
        use_colors=None if sys.stdout else False,  # it asks the terminal, if there is one
        ws="none",
        http="httptools",
        log_level="info",
        timeout_graceful_shutdown=ceil(options.shutdown_timeout),
    )
    return Server(config)


def serve_app(app: FastAPI, sock: socket.socket) -> None:
    """Serves until a signal comes. Exits with 1 if the engine has died."""
    host = sock.getsockname()[0]
    if is_local(host) and not app.state.server.options.api_key:
        # a web page could give its own name this machine's address, and then call the server
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL, host])
    server = new_server(app)
    server.run(sockets=[sock])
    if server.has_failed:
        sys.exit(1)
