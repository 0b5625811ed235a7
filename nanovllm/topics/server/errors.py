"""Errors: what the server answers when it refuses a request or when a request fails."""

import logging
import re

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from nanovllm.options import PromptTooLong, shown
from nanovllm.schedule import ScheduleError
from nanovllm.topics.decoding import structured

logger = logging.getLogger("uvicorn.error")

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
# by which pydantic names parts of a union
KINDS = ("str", "int", "bool", "dict", "CallNamed")


class Refused(Exception):
    """An error message for the client, with the HTTP status, the field, and a code for programs."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class Unavailable(Refused):
    """The engine takes no requests: it is ending, or it has died."""

    def __init__(self, message: str):
        super().__init__(message, status=503)


def in_words(error: ValueError, body: BaseModel) -> Refused:
    """The answer to a request that the engine refuses: the message begins with a field's name."""
    message = str(error)[:1000].replace("StructuredOutputsParams", "structured_outputs")
    if getattr(body, "structured_outputs", None) is None:  # they come from another field
        form = getattr(body, "field_of_form", r"\g<0>")
        message = re.sub(r"^structured_outputs\.\w+", form, message)
    names = [word for word in re.findall(r"\w+", message) if word in type(body).model_fields]
    param = names[0] if names else None
    if isinstance(error, PromptTooLong):
        # the words and the code that programs look for
        message += " (the maximum context length)"
        return Refused(message, param, code="context_length_exceeded")
    return Refused(message, param)


def failed(error: Exception) -> Refused:
    """The answer to a request that failed in the engine. The server's log has the traceback."""
    if isinstance(error, Refused):
        return error
    logger.error("a request failed", exc_info=error)
    if isinstance(error, structured.DeadEnd | FloatingPointError | ScheduleError):
        return Refused(str(error), status=500)  # for the author of the scheduler, or of the weights
    message = f"the engine failed on this request ({type(error).__name__}): see the server's log"
    return Refused(message, status=500)


def first_problem(error: RequestValidationError) -> Refused:
    """The first wrong field of a body."""
    problems = error.errors()
    # of a union, the kind that fits: its value is wrong, and not its type
    fitting = [problem for problem in problems if not problem["type"].endswith("_type")]
    fields = {problem["loc"][:2] for problem in problems}
    problem = (fitting or problems)[0] if len(fields) == 1 else problems[0]
    if problem["type"] == "json_invalid":
        return Refused("the body is not JSON")
    unknown = problem.get("ctx", {}).get("unknown", [])
    path = [part for part in (*problem["loc"], *unknown[:1]) if part != "body"]
    if not path:
        return Refused("the body must be a JSON object, sent as application/json")
    field = place = str(path[0])[:100]
    for part in path[1:]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part not in KINDS:
            place += f".{part[:100]}"
    if problem["type"] == "extra_forbidden":
        more = f" ({len(unknown) - 1:,} more fields are not, either)" if len(unknown) > 1 else ""
        return Refused(f"{place} is not supported: leave it out{more}", field)
    value = problem["input"]
    if isinstance(value, int | float | str):
        place += f"={shown(value)} is not allowed"
    message = problem["msg"][:200]
    return Refused(f"{place}: {message[0].lower()}{message[1:]}", field)


def content_of(error: Refused) -> dict:
    """The JSON of an error, in OpenAI's form."""
    content = {
        "message": str(error),
        "type": TYPES.get(error.status, "invalid_request_error"),
        "param": error.param,
        "code": error.code or error.status,
    }
    return {"error": content}


async def answer_to(_: object, error: Exception) -> JSONResponse:
    """The answer of a route that raised an error."""
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, RequestValidationError):
        error = first_problem(error)
    elif isinstance(error, HTTPException):  # no such path or method, a body that is too long
        error = Refused(str(error.detail).lower(), status=error.status_code)
    refused = failed(error)
    if refused.status in (429, 503):
        headers["Retry-After"] = "1"
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"  # a browser asks for no password
    return JSONResponse(content_of(refused), refused.status, headers)
