"""Settings: the options of the server, as the command line has them."""

from dataclasses import dataclass, field
from math import inf
from typing import Any

from nanovllm.config import Config
from nanovllm.options import ABOVE_0, Options, Rule, integer, is_text, listed, number, option
from nanovllm.routing import MOST_REPLICAS, PrefixAffinity, Router

TEXTS = listed(is_text, "a list of texts, none of them empty")
NAMES = Rule(lambda value: value and TEXTS.allows(value), TEXTS.words)
SECRET = Rule(lambda value: True, "")  # its message would show it
LARGE = integer(1, inf, "an integer from 1 on")
COUNT = integer(0, inf, "an integer from 0 on")
TIME = number(0, inf, "a number from 0 on")
SHARE = number(ABOVE_0, inf, "a positive number")
ROUTER = Rule(
    lambda value: isinstance(value, type) and issubclass(value, Router),
    "a subclass of nanovllm.routing.Router",
)


def texts(meaning: str, rule: Rule = TEXTS) -> Any:
    return field(default_factory=list, metadata={"meaning": meaning, "rule": rule})


@dataclass(kw_only=True)
class ServerOptions(Options):
    served_model_name: list[str] = texts(
        "Names for clients; the first one is that of metrics. Default: that of the model.", NAMES
    )
    api_key: list[str] = texts(
        "Keys that clients send; also in NANOVLLM_API_KEY, where `ps` does not show them.", SECRET
    )
    allowed_origins: list[str] = texts("Pages of others that may ask (CORS).")
    max_waiting: int = option(256, "Requests that may wait; others get a 429.", COUNT)
    max_body_bytes: int = option(2**20, "The longest body.", LARGE)
    drain_seconds: float = option(30.0, "Time for running requests, at the end.", TIME)
    allow_priority: bool = option(False, "Let clients say which request goes first.")
    chat_template: str | None = option(
        None, "A file in Jinja, instead of the model's own template.", Rule(is_text, "a text")
    )
    log_requests: bool = option(True, "A line in the log for each request.")

    def __post_init__(self):
        super().__post_init__()
        if not TEXTS.allows(self.api_key):
            raise ValueError(f"api_key is not allowed: it must be {TEXTS.words}")


@dataclass(kw_only=True)
class ReplicaOptions(Options):
    replicas: int = option(
        1, "Engines, by Ray Serve; not given: one, without Ray.", integer(1, MOST_REPLICAS)
    )
    max_replicas: int | None = option(None, "The most of them, under load.", LARGE)
    target_requests: float = option(32.0, "Open requests with which a replica is loaded.", SHARE)
    router_cls: type = option(PrefixAffinity, "Says which replica serves a request.", ROUTER)
    cpus_per_rank: float = option(0.5, "Cores that Ray reserves for each rank.", SHARE)

    def __post_init__(self):
        super().__post_init__()
        most = self.max_replicas
        is_most = most is None or self.replicas <= most <= MOST_REPLICAS
        allowed = f"None or an integer from replicas={self.replicas} to {MOST_REPLICAS}"
        self.require("max_replicas", is_most, allowed)

    def resources(self, config: Config, has_gpus: bool) -> dict[str, float]:
        """What Ray reserves for a replica: the ranks of one are on one machine."""
        num_ranks = config.tensor_parallel_size
        num_gpus = num_ranks if has_gpus and config.device != "cpu" else 0
        return {"CPU": self.cpus_per_rank * num_ranks, "GPU": num_gpus}
