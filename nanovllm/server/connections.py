"""Connections: what a client may do to one before there is a request."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SECONDS = 15.0  # for a request's headers; between requests, uvicorn's own limit holds
LONGEST_HEADERS = 2**16  # bytes; also of those behind a body


class Connection(HttpToolsProtocol):
    """Ends if headers do not come to an end: neither in time nor in size has httptools a limit."""

    num_header_bytes = 0  # that have come since the last part of a body
    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self.clear_deadline()
        super().connection_lost(exc)

    def set_deadline(self) -> None:
        self.clear_deadline()
        self.deadline = self.loop.call_later(SECONDS, self.transport.close)

    def clear_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def data_received(self, data: bytes) -> None:
        self.num_header_bytes += len(data)
        super().data_received(data)
        if self.num_header_bytes > LONGEST_HEADERS:
            self.send_400_response("The headers are too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.num_header_bytes = 0
        self.set_deadline()

    def on_headers_complete(self) -> None:
        self.clear_deadline()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.num_header_bytes = 0
        super().on_body(body)
