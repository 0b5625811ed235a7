"""Settings: the options of the server, as the command line has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm.options import Options, is_int, is_number

LARGEST_BODY = 4 * 2**20
SMALLEST_BODY = 256 * 2**10
BYTES_PER_TOKEN = 32  # of text in JSON: 12 are a character that is written as \ud83d\ude00


@dataclass(kw_only=True)
class ServerOptions(Options):
    served_model_name: list[str]  # the first one is that of answers and metrics
    api_key: list[str] = field(default_factory=list)
    max_waiting: int = 256
    max_body_bytes: int | None = None
    max_tokens_per_call: int = 2**20
    drain_seconds: float = 30.0
    allowed_origins: list[str] = field(default_factory=list)
    allow_priority: bool = False
    chat_template: str | None = None  # in Jinja, instead of the model's own
    log_requests: bool = True

    def __post_init__(self):
        names = self.served_model_name
        is_names = is_texts(names) and len(names) > 0
        self.require("served_model_name", is_names, "a list of texts, none of them empty")
        if not is_texts(self.api_key):  # which the message does not show
            raise ValueError(
                "api_key is not allowed: it must be a list of texts, none of them empty"
            )
        is_bytes = self.max_body_bytes is None or is_int(self.max_body_bytes, 1)
        self.require("max_body_bytes", is_bytes, "None, or an integer from 1 on")
        for name, low in (("max_waiting", 0), ("max_tokens_per_call", 1)):
            is_allowed = is_int(getattr(self, name), low)
            self.require(name, is_allowed, f"an integer from {low} on")
        is_time = is_number(self.drain_seconds, 0)
        self.require("drain_seconds", is_time, "a number from 0 on")

    def most_bytes(self, max_model_len: int) -> int:
        """Of a body. What is longer would not fit into the model, and reading it takes time that
        all requests share."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return min(LARGEST_BODY, max(SMALLEST_BODY, BYTES_PER_TOKEN * max_model_len))


def is_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(one, str) and one for one in values)
