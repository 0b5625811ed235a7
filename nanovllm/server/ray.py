"""Ray: the application for a cluster that runs already.

    serve run nanovllm.server.ray:app model=MODEL replicas=2

The server is a deployment there, too: Ray's proxies on each machine pass on to it what they get.
"""

from __future__ import annotations

import io
from argparse import Namespace
from contextlib import redirect_stderr
from typing import Any

from ray import serve
from ray.serve import Application

from nanovllm.options import refusal
from nanovllm.server import cli
from nanovllm.server.commands import replica_options
from nanovllm.server.replicas import NO_LIMIT, Ingress
from nanovllm.server.scaling import engines


def app(args: dict[str, Any]) -> Application:
    """What `serve run` and its config files call, with the options of `nanovllm serve`. Raises
    ValueError."""
    for name in ("host", "port"):
        if name in args:
            raise refusal(name, args[name], "Ray says where it listens: http_options")
    config, server, options = replica_options(parsed(args))
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        max_ongoing_requests=NO_LIMIT,
        ray_actor_options={"num_cpus": options.cpus_per_rank},
        graceful_shutdown_timeout_s=server.drain_seconds,
    )
    return ingress.bind(engines(config, server, options), options.replicas, server)


def parsed(args: dict[str, Any]) -> Namespace:
    """Parses options as the command line does. Raises ValueError."""
    words = ["serve", *cli.words_of(args)]
    problem = io.StringIO()
    try:
        with redirect_stderr(problem):
            return cli.parsed(words)
    except SystemExit:
        raise ValueError(problem.getvalue().strip().rpartition("error: ")[2]) from None
