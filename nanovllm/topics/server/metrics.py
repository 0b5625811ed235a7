"""Metrics: what Prometheus reads, with vLLM's names and our prefix."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanovllm.sequence import Request
from nanovllm.topics.server.async_llm import Delta
from nanovllm.topics.server.errors import Refused

SHORT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 40)
LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

GAUGES = {
    "kv_cache_usage_perc": ("kv_blocks_share", "Used KV blocks, 1 is all."),
    "num_requests_running": ("requests_running", "Requests in the batch."),
    "num_requests_waiting": ("requests_waiting", "Those that wait for it, or are tokenized now."),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that were admitted."),
    "generation_tokens": ("output_tokens", "Tokens that were drawn."),
    "num_preemptions": ("preemptions", "Requests that lost their blocks."),
    "prefix_cache_queries": ("prompt_tokens", "Tokens that were looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hit_tokens", "Those of them that were found."),
    "spec_decode_num_drafts": ("drafts", "Drafts: how often a sequence had draft tokens."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Draft tokens."),
    "spec_decode_num_accepted_tokens": ("accepted_draft_tokens", "Accepted draft tokens."),
}


OF_A_PLACE = "accepted_draft_tokens_"  # and 1 for the first draft token


def is_counter(key: str) -> bool:
    """Whether a statistic only grows. The others are gauges."""
    return key.startswith(OF_A_PLACE) or key in dict(COUNTERS.values())


class Metrics:
    """The metrics of one server. When Prometheus asks, the engine's counters are read from
    `stats`."""

    def __init__(self, model_name: str):
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self.stats: dict[str, float] = {}
        self.registry.register(self)
        self.outputs = Counter(
            "nanovllm:request_success",
            "Outputs that have ended, by reason; also those that were aborted or failed.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.first_token = self.histogram(
            "time_to_first_token_seconds", SHORT, "From a request's arrival to its first token."
        )
        self.between_tokens = self.histogram(
            "inter_token_latency_seconds", SHORT, "Between two tokens of an output."
        )
        self.whole = self.histogram(
            "e2e_request_latency_seconds", LONG, "From a request's arrival to its last token."
        )

    def histogram(self, name: str, buckets: tuple[float, ...], text: str) -> Histogram:
        family = Histogram(
            f"nanovllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
        )
        return family.labels(self.model_name)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (key, text) in table.items():
                family = kind(f"nanovllm:{name}", text, labels=["model_name"])
                family.add_metric([self.model_name], self.stats.get(key, 0))
                yield family

    def text(self, stats: dict[str, float]) -> bytes:
        share = stats.get("kv_blocks_used", 0) / max(1, stats.get("kv_blocks", 0))
        self.stats = stats | {"kv_blocks_share": share}
        return generate_latest(self.registry)

    def count(self, finished_reason: str | None, num_outputs: int = 1) -> None:
        """Counts outputs that have ended."""
        self.outputs.labels(self.model_name, finished_reason).inc(num_outputs)

    async def watched(
        self, deltas: AsyncGenerator, requests: list[Request], begin: float
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yields the same Deltas and records their times, counted from `begin`, when the HTTP
        request arrived."""
        unfinished = dict(enumerate(requests))
        last: dict[tuple, float] = {}
        reason = "abort"
        try:
            async with aclosing(deltas):
                async for i, delta in deltas:
                    self.see(i, delta, begin, last)
                    if delta.output is not None:
                        del unfinished[i]
                    yield i, delta
        except Refused:
            reason = "error"
            raise
        finally:
            for request in unfinished.values():
                self.count(reason, request.params.n)

    def see(self, i: int, delta: Delta, begin: float, last: dict[tuple, float]) -> None:
        """Records the times of a Delta. `last` has the time of the last token of each request and
        output."""
        now = time.perf_counter()
        for part in delta.parts:
            key = (i, part.index)
            if key in last:
                self.between_tokens.observe(now - last[key])
            else:
                self.first_token.observe(now - begin)
            last[key] = now
        if delta.output is None:
            return
        self.whole.observe(now - begin)
        for one in delta.output.outputs:
            self.count(one.finish_reason)
            # empty if its parts were counted
            times = delta.times[: len(one.token_ids)]
            if times:
                self.first_token.observe(times[0] - begin)
            for before, after in pairwise(times):
                self.between_tokens.observe(after - before)
