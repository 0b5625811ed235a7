"""Serve: from a model and a port to a server that ends in an orderly way."""

import asyncio
import atexit
import gc
import logging
import socket
import sys
import time
from logging.handlers import QueueHandler, QueueListener
from queue import Queue

import uvicorn
from fastapi import FastAPI

from nanovllm.options import refusal
from nanovllm.server.app import Server
from nanovllm.server.connections import Connection

logger = logging.getLogger("uvicorn.error")
SWITCH = 0.0005  # seconds; by itself, Python lets a thread go on for ten times as long
MOST_LINES = 10_000  # of the log that wait to be written
SECONDS_TO_TELL = 1.0  # for the errors of those that wait, if the engine has died


class DrainingServer(uvicorn.Server):
    """The first signal lets the requests that run end, and refuses others; the second ends them;
    the third does not wait for clients either."""

    def __init__(self, config: uvicorn.Config, server: Server):
        super().__init__(config)
        self.server = server
        self.num_signals = 0
        self.has_failed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # the model stays: a look at all its objects takes a quarter of a second
        # PyTorch gives the interpreter back in each operation, and must not wait long to get it
        sys.setswitchinterval(SWITCH)
        for sock in sockets or ():
            host, port = sock.getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            options = self.server.options
            model = options.served_model_name[0]
            logger.info("Serving %s at http://%s:%d (Ctrl-C ends it)", model, name, port)
            if not (host.startswith("127.") or host == "::1" or options.api_key):
                logger.warning("All that can reach %s may use it: --api-key asks for a key", host)
        self.watching = asyncio.ensure_future(self.end_with_the_engine())

    async def end_with_the_engine(self) -> None:
        """A process without an engine is of no use: what supervises it shall see that it ends."""
        engine = self.server.engine
        await engine.has_died.wait()
        self.has_failed = True
        await asyncio.sleep(SECONDS_TO_TELL)
        logger.error("Ending: %s", engine.end)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: object) -> None:
        self.num_signals += 1
        if not self.started or self.num_signals > 2:
            self.should_exit = self.force_exit = True
        elif self.num_signals == 1:
            asyncio.run_coroutine_threadsafe(self.drain(), self.server.engine.loop)
        else:
            engine = self.server.engine
            engine.loop.call_soon_threadsafe(engine.close)

    async def drain(self) -> None:
        seconds = self.server.options.drain_seconds
        engine = self.server.engine
        logger.info("Shutting down: %d requests have %g s to end", len(engine.open), seconds)
        if self.server.live is not None:
            self.server.live.close()  # watchers would stay for ever
        await engine.drain(seconds)
        engine.close()  # what is left ends with an error
        await asyncio.sleep(0.1)  # which is sent
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at this address, so that no other server takes it meanwhile. Raises
    ValueError if it cannot."""
    if not 0 <= port < 2**16:
        raise refusal("port", port, "it must be from 0 (any free one) to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"host={host!r}, port={port}: {error.strerror}") from error


def new_server(app: FastAPI) -> DrainingServer:
    config = uvicorn.Config(
        app,
        access_log=False,  # the gate's line says more
        use_colors=None if sys.stdout else False,  # it asks the terminal, if there is one
        http=Connection,
        ws="none",
        log_level="info",
        timeout_graceful_shutdown=5,
    )
    return DrainingServer(config, app.state.server)


class Unhurried(QueueHandler):
    """Has a thread write the log: a line may have to wait for what reads it, as in a full pipe."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Forgets the line: too many wait already."""


def serve_app(app: FastAPI, sock: socket.socket) -> None:
    """Serves until a signal comes. Exits with 1 if the engine has died."""
    server = new_server(app)
    lines: Queue = Queue(MOST_LINES)
    log = logging.getLogger("uvicorn")  # is configured now
    QueueListener(lines, *log.handlers).start()
    log.handlers = [Unhurried(lines)]
    server.run(sockets=[sock])
    for _ in range(100):  # a second at most
        if lines.unfinished_tasks:
            time.sleep(0.01)
    if lines.unfinished_tasks:  # nothing reads them: at its end, Python would wait for the thread
        atexit.unregister(logging.shutdown)
        sys.stderr = None  # type: ignore[assignment]
    if server.has_failed:
        sys.exit(1)
