"""Errors: what a client is told when its request is refused or fails."""

from __future__ import annotations

import logging

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from nanovllm.schedule import ScheduleError
from nanovllm.server.calls import Busy, Unavailable

logger = logging.getLogger("uvicorn.error")

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}


class BadRequest(Exception):
    """The client's mistake: a sentence, the field, the HTTP status, and a code for programs."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


def error_of(error: Exception) -> tuple[int, dict]:
    """The HTTP status of an error, and what its client is told. What is neither the client's
    mistake nor a refusal is logged."""
    if isinstance(error, HTTPException):  # of a route that does not exist
        status, message = error.status_code, str(error.detail).lower()
    elif isinstance(error, BadRequest):
        status, message = error.status, str(error)
    elif isinstance(error, Busy):
        status, message = 429, str(error)
    elif isinstance(error, Unavailable):
        status, message = 503, str(error)
    else:
        logger.error("a request failed", exc_info=error)
        name = type(error).__name__
        message = f"the engine failed on this request ({name}); the server's log says more"
        if isinstance(error, ScheduleError):  # a sentence for the scheduler's author
            message = str(error)
        status = 500
    content = {
        "message": message,
        "type": TYPES.get(status, TYPES[400]),
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None) or status,
    }
    return status, {"error": content}


def error_response(error: Exception) -> JSONResponse:
    status, content = error_of(error)
    response = JSONResponse(content, status)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    if status in (429, 503):
        response.headers["Retry-After"] = "1"
    return response


async def answer_error(request: Request, error: Exception) -> Response:
    return error_response(error)
