"""The two threads of a server: each step is followed by its news, and each stream writes once per step.

Run: pytest tests/tutorials/test_serving_threads.py
"""

import json
import sys
from collections import Counter

import pytest

from measure import serving_threads
from measure.serving_threads import NUM_STEPS, WARM_UP, Span, fastest

pytest.importorskip("uvicorn")


def test_a_recorded_server(tmp_path, monkeypatch):
    path = tmp_path / "threads.json"
    arguments = ["serving_threads", "--tokens", "40", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    serving_threads.main()
    spans = [Span(**span) for span in json.loads(path.read_bytes())["spans"]]
    counts = Counter(span.what for span in spans)
    assert counts["step"] == NUM_STEPS and counts["report"] >= NUM_STEPS
    assert {span.stream for span in spans if span.what == "write"} == {0, 1, 2}
    assert all(span.begin < span.end for span in spans)


def test_the_fastest_steps():
    """A step takes a second, but for three that take half of one."""
    spans, now = [], 0.0
    for i in range(2 * WARM_UP + 10):
        seconds = 0.5 if WARM_UP + 4 <= i < WARM_UP + 4 + NUM_STEPS else 1.0
        spans.append(Span("step", now, now + 0.9 * seconds))
        spans.append(Span("write", now + 0.1, now + 0.2, 7 + i % 3))
        now += seconds
    found = fastest(spans)
    steps = [span for span in found if span.what == "step"]
    assert [round(span.end, 2) for span in steps] == [0.45, 0.95, 1.45]
    assert {span.stream for span in found if span.what == "write"} == {0, 1, 2}
