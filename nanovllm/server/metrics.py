"""Metrics: what Prometheus reads, by the names of vLLM with our prefix."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanovllm.outputs import RequestOutput

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 40)
LONG = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

GAUGES = {
    "num_requests_running": ("requests_running", "Requests in the batch."),
    "num_requests_waiting": ("requests_waiting", "Requests that wait for a place in it."),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that were admitted."),
    "generation_tokens": ("output_tokens", "Tokens that were drawn."),
    "num_preemptions": ("preemptions", "Requests that lost their blocks."),
    "prefix_cache_queries": ("prompt_tokens", "Tokens that were looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hit_tokens", "Those of them that were found."),
}


class Metrics:
    """Of one server. What the engine counts is read from its `stats` when somebody asks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stats: dict[str, float] = {}
        self.registry.register(self)
        self.requests = Counter(
            "nanovllm:request_success",
            "Requests that have ended, by reason.",
            ["finished_reason"],
            registry=self.registry,
        )
        self.first_token = self._histogram("time_to_first_token_seconds", SHORT)
        self.between_tokens = self._histogram("inter_token_latency_seconds", SHORT)
        self.whole = self._histogram("e2e_request_latency_seconds", LONG)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        return Histogram(f"nanovllm:{name}", text, buckets=buckets, registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """What a registry asks of a collector."""
        stats = self.stats
        for name, (key, text) in GAUGES.items():
            yield GaugeMetricFamily(f"nanovllm:{name}", text, stats.get(key, 0))
        num_used = stats.get("kv_blocks_used", 0)
        used = num_used / max(1, stats.get("kv_blocks", 0))
        yield GaugeMetricFamily("nanovllm:kv_cache_usage_perc", "Used KV blocks, 1 is all.", used)
        for name, (key, text) in COUNTERS.items():
            yield CounterMetricFamily(f"nanovllm:{name}", text, stats.get(key, 0))

    def text(self, stats: dict[str, float]) -> bytes:
        self.stats = stats
        return generate_latest(self.registry)


class Clock:
    """Of one call: when its tokens come."""

    def __init__(self, metrics: Metrics):
        self.metrics = metrics
        self.start = time.perf_counter()
        self.last: dict[int, float] = {}  # by choice
        self.ended: set[int] = set()

    def token(self, choice: int, is_last: bool) -> None:
        now = time.perf_counter()
        before = self.last.get(choice)
        if before is None:
            self.metrics.first_token.observe(now - self.start)
        else:
            self.metrics.between_tokens.observe(now - before)
        self.last[choice] = now
        if is_last:
            self.ended.add(choice)

    def end(self, output: RequestOutput) -> None:
        self.metrics.whole.observe(time.perf_counter() - self.start)
        for one in output.outputs:
            self.metrics.requests.labels(str(one.finish_reason)).inc()
