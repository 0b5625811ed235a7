"""Errors: what a client is told when its request is refused or fails."""

import logging

from nanovllm.schedule import ScheduleError

logger = logging.getLogger("uvicorn.error")

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}


class Refused(Exception):
    """A sentence for the client, with the HTTP status, the field, and a code for programs."""

    status = 400
    param: str | None = None
    code: str | None = None


class BadRequest(Refused):
    """The client's mistake."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class Busy(Refused):
    """Too many requests wait already."""

    status = 429


class Unavailable(Refused):
    """The engine takes no requests: it ends, or it has died."""

    status = 503


def error_of(error: Exception) -> tuple[int, dict]:
    """The HTTP status of an error, and what its client is told. What is no refusal is logged."""
    status = 500
    message = str(error)
    if isinstance(error, Refused):
        status = error.status
    else:
        logger.error("a request failed", exc_info=error)
        if not isinstance(error, ScheduleError):  # else a sentence for the scheduler's author
            name = type(error).__name__
            message = f"the engine failed on this request ({name}); the server's log says more"
    content = {
        "message": message,
        "type": TYPES.get(status, TYPES[400]),
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None) or status,
    }
    return status, {"error": content}
