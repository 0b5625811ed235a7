"""Visits: what the log and the metrics say of one HTTP request."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from nanovllm.frontend.outputs import RequestOutput
from nanovllm.server.metrics import Metrics

logger = logging.getLogger("uvicorn.error")
QUIET = ("/health", "/metrics")  # what probes ask all the time is logged only if it fails
LEFT = 499  # the status, in log and metrics, if the client leaves before its answer begins


@dataclass
class Visit:
    """One HTTP request, from its arrival to its end."""

    method: str
    path: str
    request_id: str
    begin: float = field(default_factory=time.perf_counter)
    status: int = LEFT
    num_prompt: int = 0  # tokens
    num_output: int = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def end(self, metrics: Metrics, known_paths: set[str], is_logged: bool) -> None:
        path = self.path if self.path in known_paths else "other"  # or each typo is a new series
        metrics.responses.labels(path, self.status).inc()
        if is_logged and (self.path not in QUIET or self.status != 200):
            tokens = ""
            if self.num_prompt:
                tokens = f" {self.num_prompt} tokens in, {self.num_output} out,"
            what = f"{self.method} {self.path[:200]!r} {self.status}"
            logger.info("%s:%s %.3f s, id %r", what, tokens, self.seconds, self.request_id)


class Clock:
    """The times at which the tokens of one call come, from its arrival on."""

    def __init__(self, metrics: Metrics, visit: Visit):
        self.metrics = metrics
        self.visit = visit
        self.submitted = visit.seconds
        self.last: dict[int, float] = {}  # by choice
        self.ended: set[int] = set()

    def token(self, choice: int, is_last: bool) -> None:
        """A token of a stream."""
        now = self.visit.seconds
        before = self.last.get(choice)
        if before is None:
            self.metrics.first_token.observe(now)
        else:
            self.metrics.between_tokens.observe(now - before)
        self.last[choice] = now
        if is_last:
            self.ended.add(choice)

    def tokens(self, output: RequestOutput, gaps: list[float]) -> None:
        """All tokens of a request that is not streamed; the first gap begins when it was
        submitted."""
        for one in output.outputs:
            own = gaps[: len(one.token_ids)]
            for gap in own[:1]:
                self.metrics.first_token.observe(self.submitted + gap)
            for gap in own[1:]:
                self.metrics.between_tokens.observe(gap)

    def end(self, output: RequestOutput) -> None:
        self.metrics.whole.observe(self.visit.seconds)
        self.metrics.count_output(output)
