"""What two threads of a server do: each token of each stream is an event, and the steps are chosen that nothing disturbed.

Run: pytest tests/tutorials/test_serving_threads.py
"""

from collections import Counter

import pytest
from extras import needs

from measure.serving_threads import NUM_STEPS, WARM_UP, Span, fastest, recorded


def test_a_recorded_server():
    needs("uvicorn")
    spans = recorded(30)
    assert all(span.begin < span.end for span in spans)
    counts = Counter(span.what for span in spans)
    assert counts["step"] >= 30 and counts["report"] >= 30
    assert counts["event"] == 3 * 30
    assert 3 <= counts["write"]  # which may have several events each


def made_up(seconds, streams) -> list[Span]:
    """Steps of these seconds, in each of which these streams are written to."""
    spans, now = [], 0.0
    for i in range(2 * WARM_UP + 20):
        spans.append(Span("step", now, now + 0.9 * seconds(i)))
        spans += [Span("write", now + 0.1, now + 0.2, stream) for stream in streams(i)]
        now += seconds(i)
    return spans


def test_the_fastest_steps():
    """The very fastest ones do not count: there, a stream is not written to."""
    late, fast = 2 * WARM_UP, WARM_UP + 4
    spans = made_up(
        lambda i: 0.4 if i >= late else 0.5 if fast <= i < fast + NUM_STEPS else 1.0,
        lambda i: (7, 9) if i >= late else (7, 8, 9),
    )
    found = fastest(spans)
    steps = [span for span in found if span.what == "step"]
    assert [round(span.end, 2) for span in steps] == [0.45, 0.95, 1.45]
    assert {span.stream for span in found if span.what == "write"} == {0, 1, 2}


def test_a_machine_that_is_too_busy():
    with pytest.raises(ValueError, match="the machine is busy"):
        fastest(made_up(lambda i: 1.0, lambda i: (7,)))
