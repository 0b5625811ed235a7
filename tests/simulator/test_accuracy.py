"""The simulator against the engine: a replay is exact, and another schedule is refused.

Run: pytest tests/simulator/test_accuracy.py [-k replay]
"""

import random
from dataclasses import replace

import pytest

from nanovllm import LLM, simulate
from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.scheduler import Scheduler
from nanovllm.topics.simulator.cost_model import Hardware
from nanovllm.topics.simulator.machines import Machine
from tutorials.measure import pairs
from tutorials.measure.cases import SWAP, simulated
from tutorials.measure.recording import KnownProposer, Recording, record
from tutorials.simulation.workloads import (
    all_at_once,
    copied,
    fixed,
    lognormal,
    merged,
    multi_turn,
    poisson,
    workload,
)

OPTIONS = {"dtype": "float32", "max_num_batched_tokens": 64, "num_blocks": 200}


class Clock:
    """The k-th look at it comes 1 to 9 ms after the one before."""

    def __init__(self):
        self.now, self.rng = 100.0, random.Random(0)

    def __call__(self) -> float:
        self.now += self.rng.uniform(0.001, 0.009)
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def play(jobs, clock=None, **options):
    clock = clock or Clock()
    llm = LLM(device="cpu", **OPTIONS | options)
    if "speculative_config" in options:
        llm.scheduler.proposer = KnownProposer(LLM(device="cpu", **OPTIONS), jobs)
    return record(llm, jobs, clock, clock.sleep)


def replay(jobs, steps, scheduler_cls=None, **options):
    return simulate(
        jobs, Config(model=EMBEDDED_MODEL, **OPTIONS | options), Recording(steps), scheduler_cls
    )


def chats(count=12, rate=20.0, seed=0):
    return workload(poisson(rate, seed), lognormal(40, 8, max_model_len=200, seed=seed), count)


def cramped():
    """They have room for their prompts, but not for their answers."""
    return [job._replace(max_tokens=60) for job in workload(all_at_once(), fixed(20, 60), 8)]


def with_guesses(jobs):
    """The real engine knows when an answer ends, and proposes no further: so these jobs tell it, too."""
    rng = random.Random(0)
    return [
        job._replace(max_tokens=job.num_outputs, right_draft_tokens=[*copied(rng, job.num_outputs)])
        for job in jobs
    ]


WORKLOADS = {
    "open loop": (chats(), {}),
    "with pauses": (chats(rate=2.0, count=8), {}),
    "closed loop": (
        multi_turn(
            poisson(10), lognormal(30, 6, max_model_len=100), 5, think=0.1, max_model_len=400
        ),
        {},
    ),
    "both": (
        merged(chats(6), multi_turn(all_at_once(), fixed(20, 5), 3, think=0.0, max_model_len=300)),
        {},
    ),
    "recompute": (cramped(), {"num_blocks": 16}),
    "swap": (cramped(), {"num_blocks": 16} | SWAP),
    "guesses": (with_guesses(chats()), {"speculative_config": {}}),
}


# --- recording and replay ---


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_replay_is_exact(name):
    """The same times, arrivals, cache hits and preemptions, all of them equal to the last bit."""
    jobs, options = WORKLOADS[name]
    run, steps = play(jobs, **options)
    again = replay(jobs, steps, **options)
    assert [served.token_times for served in again.requests] == [
        served.token_times for served in run.requests
    ]
    assert replace(again, steps=[]) == run
    assert all(len(served.token_times) == served.job.num_outputs for served in run.requests)
    assert (run.num_preemptions > 0) == (name in ("recompute", "swap"))
    assert (run.num_swapped_blocks > 0) == (name == "swap")
    assert name != "closed loop" or run.num_cached_tokens > 0


def test_another_step_is_refused():
    class LastFirst(Scheduler):
        def priority(self, request):
            return -request.arrival

    jobs = workload(all_at_once(), [(50, 3), (50, 3), (40, 3)], 3)
    _, steps = play(jobs)
    with pytest.raises(
        ValueError, match=r"step 0 is another one: planned \[.*recorded \[.*\(tokens, context"
    ):
        replay(jobs, steps, LastFirst)
    with pytest.raises(ValueError, match="step 2 was not recorded, the recording has 2 steps"):
        replay(jobs, steps[:2])


# --- pairs of policies ---

TRUE = Machine(
    Hardware("made up", 20e9, 100e9, 0.0),
    bandwidth_share=0.5,
    flops_share=0.8,
    attention_bandwidth_share=0.1,
    attention_flops_share=0.4,
    overlap=0.0,
    seconds_per_step=0.004,
    seconds_per_sequence=5e-5,
    seconds_per_layer=0.0,
    seconds_per_chunk=6e-5,
    host_bytes_per_second=1e9,
)


def pair_of(base: list[float], other: list[float], simulated: tuple[float, float]) -> dict:
    """A row in which all measures are the same."""

    def of(seconds):
        return dict.fromkeys(pairs.KEYS, seconds)

    return {"real": [[*map(of, base)], [*map(of, other)]], "simulated": [*map(of, simulated)]}


def test_what_is_said_of_a_pair():
    key = pairs.KEYS[0]
    clear = pair_of([1.0, 1.1, 1.0], [1.5, 1.65, 1.6], (1.0, 1.3))
    verdict = pairs.judged(clear, key)
    assert verdict["real"] == pytest.approx(0.5) and verdict["range"] == pytest.approx(0.1)
    assert verdict["is_clear"] and verdict["agrees"]
    noisy = pair_of([1.0, 1.0, 1.0], [1.2, 0.9, 1.1], (1.0, 0.9))
    verdict = pairs.judged(noisy, key)
    assert not verdict["is_clear"] and not verdict["agrees"]


def test_all_pairs_differ_in_one_thing_and_run():
    """Simulated, with a few jobs each."""
    rows = {}
    for pair in pairs.PAIRS:
        jobs = pairs.jobs_of_pair(pair, TRUE, 0.2)
        numbers = [pairs.numbers(simulated(jobs, case, TRUE)) for case in pair.cases]
        assert numbers[0].keys() == {*pairs.KEYS}
        rows[pair.name] = {"real": [[one] for one in numbers], "simulated": numbers}
    assert len(rows) == len(pairs.PAIRS) >= 12
