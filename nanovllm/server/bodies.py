"""Bodies: how they come over the network."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from nanovllm.server.errors import BadRequest

SECONDS = 60.0  # for the whole body


async def body_of(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """Raises BadRequest or ClientDisconnect."""
    content_type = Headers(scope=scope).get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise BadRequest("the content type must be application/json", status=415)
    try:
        return await asyncio.wait_for(joined(receive, most_bytes), SECONDS)
    except asyncio.TimeoutError as error:
        raise BadRequest(f"the body has not come within {SECONDS:g} s", status=408) from error


async def joined(receive: Receive, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > most_bytes:
            allowed = f"at most {most_bytes:,} bytes are allowed"
            raise BadRequest(f"the body is too long: {allowed} (--max-body-bytes)", status=413)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
