"""Metrics and pictures of simulated runs: each number is compared with one computed by hand.

Run: pytest tests/simulator/test_metrics.py [-k gantt]
"""

import json
import math
from array import array

import pytest

from nanovllm.topics.simulator.jobs import Job, PlannedStep, Run, Served
from tutorials.simulation.metrics import (
    backlog,
    by_tenant,
    distribution,
    gantt_text,
    jain,
    summary,
    table,
)


def served(arrival, times, prompt=10, outputs=None, cached=0, preemptions=0, **extra_args):
    outputs = len(times) if outputs is None else outputs
    job = Job(arrival, ((1, prompt),), outputs, extra_args=extra_args)
    return Served(job, arrival, array("d", times), cached, preemptions)


THREE = Run(  # finished; finished with one token; unfinished
    [
        served(1.0, [2, 3, 5]),
        served(0.0, [4], prompt=4, cached=2),
        served(2.0, [6, 7], prompt=6, outputs=5),
    ],
    seconds=10.0,
    busy_seconds=8.0,
    num_steps=7,
    num_computed_tokens=26,
    num_prompt_tokens=20,
    num_cached_tokens=2,
    num_preemptions=1,
    num_swapped_blocks=3,
    kv_use=0.25,
)


def numbers(value):
    """All numbers of a summary."""
    values = value.values() if isinstance(value, dict) else value
    return [x for v in values for x in (numbers(v) if isinstance(v, dict | list) else [v])]


# --- latency and throughput ---


def test_latencies():
    result = summary(THREE)
    assert (result["requests"], result["unfinished"], result["seconds"], result["steps"]) == (
        3,
        1,
        10.0,
        7,
    )
    ttft = {"mean": 3.0, "p50": 4.0, "p90": 4.0, "p99": 4.0, "max": 4.0}  # of 1, 4 and 4 seconds
    assert result["ttft"] == ttft
    # (5 - 2) / 2: the others have one token, or are unfinished
    assert set(result["tpot"].values()) == {1.5}
    assert result["between_tokens"]["mean"] == pytest.approx(4 / 3)  # 1, 2; none; 1
    assert result["between_tokens"]["max"] == 2
    assert set(result["latency"].values()) == {4.0}
    normalized = result["normalized_latency"]  # of 4/3 and 4 seconds per token
    assert (normalized["mean"], normalized["p50"]) == pytest.approx((8 / 3, 8 / 3))
    assert normalized["p90"] == pytest.approx(4 / 3 + 0.9 * 8 / 3)
    assert normalized["max"] == 4


def test_counts_and_shares():
    result = summary(THREE)
    assert result["requests_per_second"] == pytest.approx(0.2)
    assert result["output_tokens_per_second"] == pytest.approx(0.6)
    assert result["busy_share"] == pytest.approx(0.8)
    assert result["kv_use"] == 0.25
    assert result["prefix_hit_rate"] == pytest.approx(0.1)
    assert (result["preemptions"], result["swapped_blocks"]) == (1, 3)
    # needed: 10 + 3 - 1 = 12; 4 - 2 + 1 - 1 = 2; 6 + 2 - 1 = 7
    assert result["tokens_computed_again"] == 26 - 21


def test_percentiles_are_interpolated():
    values = distribution([30.0, None, 10.0, 20.0, 40.0, 50.0])
    assert values == {
        "mean": 30,
        "p50": 30,
        "p90": pytest.approx(46),
        "p99": pytest.approx(49.6),
        "max": 50,
    }
    assert distribution([7.0]) == {"mean": 7, "p50": 7, "p90": 7, "p99": 7, "max": 7}
    assert set(distribution([None]).values()) == {None}


@pytest.mark.parametrize(
    "slo, good", [((1.0, 1.5), 1), ((4.0, 1.5), 2), ((4, 1), 1), ((0.9, 9), 0), ((9, 9), 2)]
)
def test_goodput(slo, good):
    """The limits themselves are good. The unfinished request is not, and counts in the share."""
    result = summary(THREE, slo)
    assert result["goodput"] == pytest.approx(good / 10)
    assert result["goodput_share"] == pytest.approx(good / 3)
    assert result["slo"] == list(slo)


def test_deadlines_are_end_to_end():
    requests = [
        served(1.0, [2, 4], deadline=3.0),  # in time
        served(1.0, [2, 4.5], deadline=3.0),
        served(1.0, [2], outputs=2, deadline=30.0),  # unfinished
        served(1.0, [9]),
    ]
    assert summary(Run(requests, seconds=10))["deadlines_met"] == pytest.approx(1 / 3)
    assert summary(Run(requests[3:], seconds=10))["deadlines_met"] is None


# --- fairness ---


def test_jain():
    assert jain([5, 5, 5]) == 1
    assert jain([1, 0, 0, 0]) == pytest.approx(1 / 4)
    assert jain([1, 3]) == pytest.approx(16 / 20)
    assert jain([]) is jain([3]) is jain([0, 0]) is None


def test_fairness_of_tenants_and_requests():
    """a gets 12, 2, 2 at 1, 2, 3 seconds; b gets 6 at 2 and 2 at 4 seconds. Both have a backlog
    until 3 seconds."""
    run = Run(
        [served(0, [1, 2, 3], tenant="a"), served(0, [2, 4], prompt=4, tenant="b"), served(0, [4])],
        seconds=4,
    )
    result = summary(run)
    assert result["service_per_second"] == {"a": pytest.approx(16 / 3), "b": 2}
    assert result["jain_tenants"] == pytest.approx((16 / 3 + 2) ** 2 / 2 / ((16 / 3) ** 2 + 4))
    assert result["jain_requests"] == pytest.approx((1 + 0.5 + 0.25) ** 2 / 3 / (1 + 0.25 + 0.0625))
    assert result["service_gap"] == 12  # the difference is 12, then 8, then 10
    assert [*by_tenant(run.requests)] == ["a", "b"]


def test_backlog():
    requests = [
        served(5, [6]),
        served(0, [2]),
        served(1, [1.5, 3]),
        served(3, [4]),
        served(7, [8], outputs=2),
    ]
    assert backlog(requests, end=9) == [(0, 4), (5, 6), (7, 9)]
    assert backlog([served(0, [9]), served(1, [2])], end=9) == [(0, 9)]
    assert backlog([served(math.inf, [], outputs=1)], end=9) == []  # it has not arrived


# --- nothing is NaN ---


@pytest.mark.parametrize(
    "run",
    [
        THREE,
        Run([]),
        Run(
            [served(0, [], outputs=3, tenant="a", deadline=1), served(0, [], outputs=1, tenant="b")]
        ),
        Run([served(0, [0], tenant="a"), served(0, [0], tenant="b")]),  # in no time
        Run([served(0, [1], tenant=1, predicted_tokens=2)], seconds=1),
    ],
)
def test_every_number_is_finite_or_none(run):
    result = summary(run, slo=(1, 1))
    assert all(x is None or math.isfinite(x) for x in numbers(result))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert "nan" not in table({"it": result}).lower()


# --- table and file ---


def test_table():
    empty = summary(Run([]))
    lines = table({"three": summary(THREE, (4, 1.5)), "nothing": empty}).splitlines()
    assert lines[0] == "                                     three  nothing"
    assert lines[1] == "requests                                 3        0"
    assert "TTFT, p99 (s)                        4.000        -" in lines
    assert "within the SLO                       66.7%        -" in lines
    # no request has a tenant or a deadline
    assert not any("Jain" in line or "deadline" in line for line in lines)
    assert len({len(line) for line in lines}) == 1 and len(lines) <= 20


# --- pictures ---


def small_run():
    """Two requests at once, one of them chunked and preempted; one that comes in the second step
    and is never done."""
    steps = [
        [(0, 4, True), (1, 2, True)],
        [(0, 1, False), (1, 3, True)],
        [(0, 1, False), (1, 1, False)],
        [(0, 1, False)],  # 1 is preempted
        [(1, 6, False)],  # its first 5 tokens, and one of its own
        [(1, 1, False), (2, 4, True)],
        [(1, 1, False)],  # 2 has no part in it
        [(2, 1, False)],
    ]
    running = [[0, 1], [0, 1], [0, 1], [0], [1], [1, 2], [1, 2], [2]]
    return Run(
        [
            served(0, [1, 2, 3, 4], prompt=4),
            served(0, [2, 3, 5, 6, 7], prompt=5, preemptions=1),
            served(1.5, [6, 8], prompt=4, outputs=9),
        ],
        seconds=8,
        num_steps=8,
        steps=[PlannedStep(i, i + 1, *step) for i, step in enumerate(zip(steps, running))],
    )


def test_gantt_text():
    assert gantt_text(small_run()) == (
        "step   0\njob 0  #ooo\njob 1  ##ox#oo\njob 2   ....#-o\n# prompt  o decode  . waits  x preempted  - no part"
    )
