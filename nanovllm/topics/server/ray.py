"""Ray: the application for a cluster that is already running.

serve run nanovllm.topics.server.ray:app model=MODEL replicas=2

The server is a deployment of the cluster, too: Ray's proxy on each machine passes HTTP requests to
it.
"""

from typing import Any

from ray import serve
from ray.serve import Application

from nanovllm.options import refusal
from nanovllm.topics.server import cli
from nanovllm.topics.server.commands import replica_options
from nanovllm.topics.server.replicas import NO_LIMIT, Ingress
from nanovllm.topics.server.scaling import engines


def app(args: dict[str, Any]) -> Application:
    """Called by `serve run` and by its config files, with the options of `nanovllm serve`. Raises
    ValueError."""
    for name in ("host", "port"):
        if name in args:
            raise refusal(name, args[name], "Ray says where it listens: http_options")
    words = ["serve", *cli.words_of(args)]
    config, server, options = replica_options(cli.new_parser().parse_args(words))
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        max_ongoing_requests=NO_LIMIT,
        ray_actor_options={"num_cpus": options.cpus_per_rank},
        graceful_shutdown_timeout_s=server.shutdown_timeout,
    )
    return ingress.bind(engines(config, server, options), options.replicas, server)
