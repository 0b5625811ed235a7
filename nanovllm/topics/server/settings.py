"""Settings: the server's options, with their names on the command line."""

from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from nanovllm.config import Config
from nanovllm.options import Options, Rule, integer, is_text, listed, number
from nanovllm.topics.routing.router import MOST_REPLICAS, PrefixAffinity, Router

TEXTS = listed(is_text, "a list of texts, none of them empty")
NAMES = Rule(lambda value: value and TEXTS.allows(value), TEXTS.words)
SECRET = Rule(lambda value: True, "")  # its message would show it
LARGE = integer(1, inf, "an integer from 1 on")
COUNT = integer(0, inf, "an integer from 0 on")
TIME = number(0, inf, "a number from 0 on")
CPUS_PER_RANK = 0.5  # that Ray reserves
ROUTER = Rule(
    lambda value: isinstance(value, type) and issubclass(value, Router),
    "a subclass of nanovllm.topics.routing.Router",
)


@dataclass(kw_only=True)
class ServerOptions(Options):
    served_model_name: list[str] = field(default_factory=list)
    """Names of the model for clients; metrics have the first one. Default: the model's own name."""

    api_key: list[str] = field(default_factory=list)
    """Keys that clients must send. In NANOVLLM_API_KEY, `ps` does not show them."""

    allowed_origins: list[str] = field(default_factory=list)
    """Web pages of other origins that may call the server (CORS)."""

    max_waiting: int = 256
    """Maximum waiting requests; further ones get status 429."""

    max_body_bytes: int = 2**20
    """Maximum bytes of a request's body."""

    shutdown_timeout: float = 30.0
    """Seconds that running requests have to end after a signal."""

    chat_template: str | None = None
    """A Jinja file that replaces the model's chat template."""

    log_requests: bool = True
    """Log one line for each request."""

    RULES: ClassVar[dict[str, Rule]] = {
        "served_model_name": NAMES,
        "api_key": SECRET,
        "allowed_origins": TEXTS,
        "max_waiting": COUNT,
        "max_body_bytes": LARGE,
        "shutdown_timeout": TIME,
        "chat_template": Rule(is_text, "a text"),
    }

    def __post_init__(self):
        super().__post_init__()
        if not TEXTS.allows(self.api_key):
            raise ValueError(f"api_key is not allowed: it must be {TEXTS.words}")


@dataclass(kw_only=True)
class ReplicaOptions(Options):
    replicas: int = 1
    """Number of engines, with Ray Serve. Without this option: one engine, without Ray."""

    router_cls: type = PrefixAffinity
    """The class that chooses a replica for each request."""

    RULES: ClassVar[dict[str, Rule]] = {
        "replicas": integer(1, MOST_REPLICAS),
        "router_cls": ROUTER,
    }

    def resources(self, config: Config, has_gpus: bool) -> dict[str, float]:
        """What Ray reserves for a replica. All ranks of one replica are on one machine."""
        num_ranks = config.tensor_parallel_size
        num_gpus = num_ranks if has_gpus and config.device != "cpu" else 0
        return {"CPU": CPUS_PER_RANK * num_ranks, "GPU": num_gpus}
