"""Metrics: what Prometheus reads, by the names of vLLM with our prefix."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from nanovllm.frontend.outputs import RequestOutput

SHORT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 40)
LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

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


class Histogram:
    """Ten times as fast as Prometheus' own, which may be shared by threads: one look per token."""

    def __init__(self, name: str, buckets: tuple[float, ...]):
        self.name = name
        self.buckets = (*buckets, math.inf)
        self.counts = [0] * len(self.buckets)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value

    def family(self) -> Metric:
        text = self.name.replace("_", " ").capitalize() + "."
        names = map(floatToGoString, self.buckets)
        pairs = [*zip(names, accumulate(self.counts))]
        return HistogramMetricFamily(f"nanovllm:{self.name}", text, pairs, self.total)


class Metrics:
    """The metrics of one server. The engine's counters are read from its `stats` on request."""

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
        self.first_token = Histogram("time_to_first_token_seconds", SHORT)
        self.between_tokens = Histogram("inter_token_latency_seconds", SHORT)
        self.whole = Histogram("e2e_request_latency_seconds", LONG)

    def collect(self) -> Iterator[Metric]:
        """What a registry asks of a collector."""
        stats = self.stats
        for name, (key, text) in GAUGES.items():
            yield GaugeMetricFamily(f"nanovllm:{name}", text, stats.get(key, 0))
        num_used = stats.get("kv_blocks_used", 0)
        used = num_used / max(1, stats.get("kv_blocks", 0))
        text = "Used KV blocks, 1 is all."
        yield GaugeMetricFamily("nanovllm:kv_cache_usage_perc", text, used)
        for name, (key, text) in COUNTERS.items():
            yield CounterMetricFamily(f"nanovllm:{name}", text, stats.get(key, 0))
        for histogram in (self.first_token, self.between_tokens, self.whole):
            yield histogram.family()

    def text(self, stats: dict[str, float]) -> bytes:
        self.stats = stats
        return generate_latest(self.registry)


class Clock:
    """The times at which the tokens of one call come."""

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
