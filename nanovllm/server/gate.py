"""Gate: what every request passes before its route. Pure ASGI: other middleware would hide that a
client has left."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from hmac import compare_digest
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.errors import BadRequest, error_response
from nanovllm.server.visits import Visit

OPEN_PATHS = {"/health"}
LONGEST_ID = 200


class Gate:
    """Asks for an API key, if there are any, and gives each answer the id of its request, also
    those of faults. Tells `at_end` of each request that has ended."""

    def __init__(self, app: ASGIApp, api_keys: list[str], at_end: Callable[[Visit], None]):
        self.app = app
        self.api_keys = api_keys
        self.at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"].rstrip("/") or "/"
        request_id = headers.get("x-request-id", "")[:LONGEST_ID] or uuid4().hex
        visit = Visit(scope["method"], path, request_id)
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        app = self.app
        if path not in OPEN_PATHS and not self.is_allowed(headers):
            app = error_response(BadRequest("the API key is missing or wrong", status=401))
            # a browser then asks for it: the key is the password, the name may be any
            app.headers["WWW-Authenticate"] = 'Basic realm="nanovllm"'
        try:
            await app({**scope, "path": path, "visit": visit}, receive, send_with_id)
        except ClientDisconnect:
            pass  # in the middle of its body
        except Exception as error:
            if has_begun:
                raise
            await error_response(error)(scope, receive, send_with_id)
        finally:
            self.at_end(visit)

    def is_allowed(self, headers: Headers) -> bool:
        if not self.api_keys:
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
        # all of them, so that the time does not say which
        return sum(compare_digest(given, key.encode()) for key in self.api_keys) > 0
