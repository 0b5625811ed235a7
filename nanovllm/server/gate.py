"""Gate: what every request passes before its route. Pure ASGI: other middleware would hide that a
client has left."""

from __future__ import annotations

import base64
import binascii
from hmac import compare_digest
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.responses import error_response, status_of

OPEN_PATHS = {"/health"}
LONGEST_ID = 200


class Gate:
    """Asks for the API key, if there is one, and gives each answer the id of its request, also
    those of faults."""

    def __init__(self, app: ASGIApp, api_key: str | None = None):
        self.app = app
        self.api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")[:LONGEST_ID] or uuid4().hex

        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        app = self.app
        if scope["path"] not in OPEN_PATHS and not self.is_allowed(headers):
            app = error_response(401, "the API key is missing or wrong")
            # a browser then asks for it: the key is the password, the name may be any
            app.headers["WWW-Authenticate"] = 'Basic realm="nanovllm"'
        try:
            await app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # in the middle of its body
        except Exception as error:
            if has_begun:
                raise
            await error_response(*status_of(error))(scope, receive, send_with_id)

    def is_allowed(self, headers: Headers) -> bool:
        if self.api_key is None:
            return True
        header = headers.get("authorization", "").encode("latin-1")  # the bytes that were sent
        scheme, _, given = header.partition(b" ")
        if scheme.lower() == b"basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return compare_digest(given, self.api_key.encode())
