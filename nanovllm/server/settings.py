"""Settings: the options of the server, as the command line has them."""

from dataclasses import dataclass, field
from typing import Any

from nanovllm.config import Config
from nanovllm.options import Options, is_int, is_number, option
from nanovllm.routing import MOST_REPLICAS, PrefixAffinity, Router

LARGEST_BODY = 4 * 2**20
SMALLEST_BODY = 256 * 2**10
BYTES_PER_TOKEN = 32  # of text in JSON: 12 are a character that is written as \ud83d\ude00


def texts(meaning: str) -> Any:
    return field(default_factory=list, metadata={"meaning": meaning})


@dataclass(kw_only=True)
class ServerOptions(Options):
    served_model_name: list[str] = texts(
        "Names for clients; the first one is that of metrics. Default: that of the model."
    )
    api_key: list[str] = texts(
        "What clients must send, one or several; also in NANOVLLM_API_KEY, where `ps` does not "
        "show it."
    )
    allowed_origins: list[str] = texts("Pages of others that may ask (CORS).")
    max_waiting: int = option(256, "Requests that may wait; others get a 429.")
    max_body_bytes: int | None = option(
        None, "The longest body. Default: 32 times max_model_len, from 256 KiB to 4 MiB."
    )
    max_tokens_per_call: int = option(2**20, "prompts * n * max_tokens.")
    drain_seconds: float = option(30.0, "Time for running requests, at the end.")
    allow_priority: bool = option(False, "Let clients say which request goes first.")
    chat_template: str | None = option(
        None, "A file in Jinja, instead of the model's own template."
    )
    log_requests: bool = option(True, "A line in the log for each request.")

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
        """The longest body. What is longer would not fit into the model, and reading it takes time
        that all requests share."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return min(LARGEST_BODY, max(SMALLEST_BODY, BYTES_PER_TOKEN * max_model_len))


@dataclass(kw_only=True)
class ReplicaOptions(Options):
    replicas: int = option(1, "Engines, by Ray Serve; if not given, there is one, without Ray.")
    max_replicas: int | None = option(None, "More of them under load, up to so many.")
    target_requests: float = option(32.0, "Open requests with which a replica is loaded.")
    router_cls: type = option(PrefixAffinity, "Says which replica serves a request.")
    cpus_per_rank: float = option(0.5, "Cores that Ray reserves for each rank of a replica.")

    def __post_init__(self):
        is_count = is_int(self.replicas, 1, MOST_REPLICAS)
        self.require("replicas", is_count, f"an integer from 1 to {MOST_REPLICAS}")
        most = self.max_replicas
        is_most = most is None or is_int(most, self.replicas, MOST_REPLICAS)
        allowed = f"None or an integer from replicas={self.replicas} to {MOST_REPLICAS}"
        self.require("max_replicas", is_most, allowed)
        for name in ("target_requests", "cpus_per_rank"):
            value = getattr(self, name)
            self.require(name, is_number(value, 0) and value > 0, "a positive number")
        is_router = isinstance(self.router_cls, type) and issubclass(self.router_cls, Router)
        self.require("router_cls", is_router, "a subclass of nanovllm.routing.Router")

    def resources(self, config: Config, has_gpus: bool) -> dict[str, float]:
        """What Ray reserves for a replica: the ranks of one are on one machine."""
        num_ranks = config.tensor_parallel_size
        num_gpus = num_ranks if has_gpus and config.device != "cpu" else 0
        return {"CPU": self.cpus_per_rank * num_ranks, "GPU": num_gpus}


def is_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(one, str) and one for one in values)
