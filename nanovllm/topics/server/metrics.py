"""Metrics: what Prometheus reads, with vLLM's names and our prefix."""

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanovllm.processing.outputs import CompletionOutput
from nanovllm.sequence import Request
from nanovllm.topics.server.async_llm import Delta
from nanovllm.topics.server.errors import Refused

SHORT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 40)
TOKENS = [digit * 10**i for i in range(6) for digit in (1, 2, 5)]
LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
Times = list[float]  # of an output's tokens

GAUGES = {
    "kv_cache_usage_perc": ("kv_blocks_share", "Used KV blocks, 1 is all."),
    "num_requests_running": ("outputs_running", "Outputs in the batch: each of n counts."),
    "num_requests_waiting": ("outputs_waiting", "Those that wait; a call in the tokenizer is one."),
}
HISTOGRAMS = {  # of each output, a request for vLLM
    "time_to_first_token_seconds": (SHORT, "From the call's arrival to the first token."),
    "inter_token_latency_seconds": (SHORT, "Between two tokens."),
    "e2e_request_latency_seconds": (LONG, "From the call's arrival to the last token."),
    "request_queue_time_seconds": (LONG, "From the call's arrival to the first step."),
    "request_prefill_time_seconds": (LONG, "From the first step to the first token."),
    "request_decode_time_seconds": (LONG, "From the first token to the last one."),
    "request_prompt_tokens": (TOKENS, "Tokens of the prompt."),
    "request_generation_tokens": (TOKENS, "Tokens of the output."),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that were admitted."),
    "generation_tokens": ("output_tokens", "Tokens that were drawn."),
    "num_preemptions": ("preemptions", "Requests that lost their blocks."),
    "prefix_cache_queries": ("prompt_tokens", "Tokens that were looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hit_tokens", "Those of them that were found."),
    "external_prefix_cache_hits": ("host_cache_hit_tokens", "Those of these only on the host."),
    "spec_decode_num_drafts": ("drafts", "Drafts: how often a sequence had draft tokens."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Draft tokens."),
    "spec_decode_num_accepted_tokens": ("accepted_draft_tokens", "Accepted draft tokens."),
}


def is_counter(key: str) -> bool:
    """Whether a statistic only grows. The others are gauges."""
    return key in dict(COUNTERS.values())


class Metrics:
    """The metrics of one server. The engine's counters are read when Prometheus asks."""

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
        options: Any = {"labelnames": ["model_name"], "registry": self.registry}
        self.histograms = {
            name: Histogram(f"nanovllm:{name}", text, buckets=buckets, **options).labels(model_name)
            for name, (buckets, text) in HISTOGRAMS.items()
        }

    def observe(self, **values: float) -> None:
        for name, value in values.items():
            self.histograms[name].observe(value)

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
        """Yields the same Deltas and records their times since `begin`, the call's arrival."""
        unfinished = dict(enumerate(requests))
        times: defaultdict[tuple, Times] = defaultdict(list)
        reason = "abort"
        try:
            async with aclosing(deltas):
                async for i, delta in deltas:
                    now = time.perf_counter()
                    for part in delta.parts:
                        self.see(times[i, part.index], begin, now)
                    if delta.output is not None:
                        del unfinished[i]
                        for one in delta.output.outputs:
                            for then in delta.times[: len(one.token_ids)]:  # of a stream: none
                                self.see(times[i, one.index], begin, then)
                            self.ended(times[i, one.index] or [now], begin, delta, one)
                    yield i, delta
        except Refused:
            reason = "error"
            raise
        finally:
            for request in unfinished.values():
                self.count(reason, request.params.n)

    def see(self, times: Times, begin: float, now: float) -> None:
        """Records a token."""
        if times:
            self.observe(inter_token_latency_seconds=now - times[-1])
        else:
            self.observe(time_to_first_token_seconds=now - begin)
        times.append(now)

    def ended(self, times: Times, begin: float, delta: Delta, one: CompletionOutput) -> None:
        """Records an output that has ended."""
        assert delta.output is not None
        self.count(one.finish_reason)
        self.observe(
            e2e_request_latency_seconds=times[-1] - begin,
            request_queue_time_seconds=delta.first_step - begin,
            request_prefill_time_seconds=times[0] - delta.first_step,
            request_decode_time_seconds=times[-1] - times[0],
            request_prompt_tokens=len(delta.output.prompt_token_ids),
            request_generation_tokens=len(one.token_ids),
        )
