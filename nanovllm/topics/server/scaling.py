"""Scaling: starts the replicas, with Ray Serve."""

import os
import re
from math import ceil

# three times as many tokens per second of small models as with Ray's own choices
RAY_SETTINGS = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
for name, value in RAY_SETTINGS.items():
    os.environ.setdefault(name, value)  # Ray reads them when it is imported

# ruff: noqa: E402
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from nanovllm.config import Config
from nanovllm.options import refusal
from nanovllm.topics.server.replicas import NO_LIMIT, Engine, new_ingress
from nanovllm.topics.server.serve import bind, serve_app
from nanovllm.topics.server.settings import ReplicaOptions, ServerOptions

NAME = "nanovllm"  # of the application


def engines(config: Config, server: ServerOptions, options: ReplicaOptions) -> Application:
    """The replicas, for a running cluster. Raises ValueError if the cluster has no room."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has_gpus = any(machine.get("GPU") for machine in machines)
    needed = options.resources(config, has_gpus)
    check_room(machines, needed, options.replicas)
    router = options.router_cls
    deployment = serve.deployment(
        Engine,
        name="engine",
        max_ongoing_requests=NO_LIMIT,
        ray_actor_options={"num_cpus": needed["CPU"], "num_gpus": needed["GPU"]},
        request_router_config=RequestRouterConfig(
            request_router_class="nanovllm.topics.server.replicas:RayRouter",
            request_router_kwargs={"router": f"{router.__module__}.{router.__qualname__}"},
        ),
        health_check_period_s=1,
        max_constructor_retry_count=2,
        graceful_shutdown_timeout_s=server.shutdown_timeout,
        num_replicas=options.replicas,
    )
    return deployment.bind(vars(config))


def check_room(machines: list[dict], needed: dict[str, float], num_replicas: int) -> None:
    """Raises ValueError if the cluster has no room. Ray would wait for more machines and only log
    it."""
    num_places = 0
    for machine in machines:
        places = [machine.get(name, 0) // count for name, count in needed.items() if count]
        num_places += int(min(places))
    if num_places < num_replicas:
        each = " and ".join(f"{count:g} {name}" for name, count in needed.items() if count)
        problem = f"each needs {each}, so Ray's machines have room for {num_places}"
        raise refusal("replicas", num_replicas, problem)


def run(
    config: Config, server: ServerOptions, options: ReplicaOptions, host: str, port: int
) -> None:
    """Starts Ray here, or connects to the cluster at RAY_ADDRESS, and serves until a signal comes.
    This process is the server: no proxy is needed, and the server ends as with one engine."""
    sock = bind(host, port)
    start_ray(options.replicas * options.resources(config, has_gpus=False)["CPU"])
    try:
        application = engines(config, server, options)
        serve.start(proxy_location="Disabled")
        try:
            start(application)
            # a handle belongs to an event loop: what serve.run returns would end after it
            handle = DeploymentHandle("engine", NAME)
            serve_app(new_ingress(handle, options.replicas, server), sock)
        finally:
            serve.delete(NAME)  # others may use the same cluster
    finally:
        ray.shutdown()


def start(application: Application) -> None:
    """Waits for the replicas. Raises ValueError with the reason if they cannot start."""
    try:
        serve.run(application, name=NAME, route_prefix=None)
    except RuntimeError as error:
        message = serve.status().applications[NAME].deployments["engine"].message
        lines = [line for line in message.splitlines() if re.match(r"[\w.]*Error: ", line)]
        raise ValueError(f"the replicas do not start: {(lines or [message])[-1]}") from error


def start_ray(num_cpus: float) -> None:
    """Starts Ray. A replica gets a part of a core: only Ray's accounting uses the number, so there
    may be more replicas than cores."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage report is sent
    if os.environ.get("RAY_ADDRESS"):
        ray.init()
        return
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, ceil(num_cpus)),
        object_store_memory=200 * 2**20,  # nothing large is ever in it
        include_dashboard=False,
    )
