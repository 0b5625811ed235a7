"""Connections: what a client may do to one before there is a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

SECONDS = 15.0  # for a request's headers; between requests, uvicorn's own limit holds
LONGEST_HEADERS = 2**16  # bytes; also of those behind a body


class Connection(HttpToolsProtocol):
    """Ends if headers do not come to an end: neither in time nor in size has httptools a limit."""

    num_header_bytes = 0  # that have come since the last part of a body

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.cycles: list[RequestResponseCycle] = []  # one after the other, if they are pipelined

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self.deadline.cancel()
        super().connection_lost(exc)
        for cycle in self.cycles:  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()

    def set_deadline(self) -> None:
        self.deadline = self.loop.call_later(SECONDS, self.transport.close)

    def data_received(self, data: bytes) -> None:
        self.num_header_bytes += len(data)
        super().data_received(data)
        if self.num_header_bytes > LONGEST_HEADERS:
            self.send_400_response("The headers are too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.num_header_bytes = 0
        self.deadline.cancel()
        self.set_deadline()

    def on_headers_complete(self) -> None:
        self.deadline.cancel()
        super().on_headers_complete()
        running = [cycle for cycle in self.cycles if not cycle.response_complete]
        self.cycles = [*running, self.cycle]

    def on_body(self, body: bytes) -> None:
        self.num_header_bytes = 0
        super().on_body(body)
