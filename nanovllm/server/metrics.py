"""Metrics: what Prometheus reads, by the names of vLLM with our prefix."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanovllm.server.streams import Delta, Stream

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
    "spec_decode_num_drafts": ("drafts", "How often a sequence had guesses."),
    "spec_decode_num_draft_tokens": ("guesses", "Tokens that were guessed."),
    "spec_decode_num_accepted_tokens": ("accepted_guesses", "Those of them that were right."),
}


OF_A_PLACE = "accepted_guesses_"  # and 1 for the first guess


def is_counter(key: str) -> bool:
    """Whether a statistic only grows. The others are gauges."""
    return key.startswith(OF_A_PLACE) or key in dict(COUNTERS.values())


class Metrics:
    """The metrics of one server. The engine's counters are read from its `stats` on request."""

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
        self.responses = Counter(
            "nanovllm:http_responses",
            "Answers to HTTP requests; 499: the client left before its answer began.",
            ["path", "status"],
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
        """What a registry asks of a collector."""
        for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (key, text) in table.items():
                family = kind(f"nanovllm:{name}", text, labels=["model_name"])
                family.add_metric([self.model_name], self.stats.get(key, 0))
                yield family
        yield self.by_place()

    def by_place(self) -> Metric:
        """Right guesses by their place, of which 0 is the first."""
        name = "nanovllm:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, "Right guesses.", labels=["model_name", "position"])
        for key, value in self.stats.items():
            if key.startswith(OF_A_PLACE):
                place = int(key.removeprefix(OF_A_PLACE)) - 1
                family.add_metric([self.model_name, str(place)], value)
        return family

    def text(self, stats: dict[str, float]) -> bytes:
        share = stats.get("kv_blocks_used", 0) / max(1, stats.get("kv_blocks", 0))
        self.stats = stats | {"kv_blocks_share": share}
        return generate_latest(self.registry)

    def count(self, finished_reason: str | None, num_outputs: int = 1) -> None:
        """Counts outputs that have ended."""
        self.outputs.labels(self.model_name, finished_reason).inc(num_outputs)


class Clock:
    """The times at which the tokens of one HTTP request come, from its arrival on."""

    def __init__(self, metrics: Metrics):
        self.metrics = metrics
        self.begin = time.perf_counter()
        self.last: dict[tuple[int, int], float] = {}  # token of each output
        self.num_prompt = 0  # tokens
        self.num_output = 0

    def see(self, delta: Delta) -> None:
        """What is new of one request."""
        now = time.perf_counter() - self.begin
        for part in delta.parts:
            self.num_output += len(part.token_ids)
            before = self.last.get((delta.index, part.index))
            if before is None:
                self.metrics.first_token.observe(now)
            else:
                self.metrics.between_tokens.observe(now - before)
            self.last[delta.index, part.index] = now
        if delta.output is None:
            return
        self.metrics.whole.observe(now)
        for one in delta.output.outputs:
            self.metrics.count(one.finish_reason)
            if delta.gaps is not None and one.token_ids:  # all of its tokens come now
                self.num_output += len(one.token_ids)
                self.metrics.first_token.observe(now - sum(delta.gaps))
                for gap in delta.gaps[: len(one.token_ids) - 1]:
                    self.metrics.between_tokens.observe(gap)

    def end(self, stream: Stream) -> None:
        """What has not ended by itself never will."""
        for request, output in zip(stream.requests, stream.outputs):
            if output is None:
                self.metrics.count("abort" if stream.error is None else "error", request.params.n)
