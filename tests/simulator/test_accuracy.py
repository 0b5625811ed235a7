"""The simulator against the engine: both take the same steps. And the pairs of policies run.

Run: pytest tests/simulator/test_accuracy.py [-k steps]
"""

import pytest

from nanovllm import LLM, SamplingParams, simulate
from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.topics.simulator.cost_model import Hardware
from nanovllm.topics.simulator.machines import Machine
from tutorials.measure import pairs
from tutorials.simulation.workloads import all_at_once, fixed, lognormal, shared_prefix, workload

OPTIONS = {"dtype": "float32", "max_num_batched_tokens": 64, "num_blocks": 200}


class Seconds(Machine):
    """Each step takes a second."""

    def seconds(self, *_, **__) -> float:
        return 1.0


def played(jobs, **options):
    """The engine's steps (jobs and tokens), when the jobs come after so many steps, and its counters."""
    llm = LLM(device="cpu", **options)
    steps: list = []
    llm.observers.append(
        lambda schedule, _: steps.append(
            [(int(seq.request.request_id), count) for seq, _, count in schedule.items]
        )
    )
    coming = [*enumerate(jobs)]
    while coming or llm.has_unfinished():
        while coming and coming[0][1].time <= len(steps):
            i, job = coming.pop(0)
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=job.num_outputs)
            llm.add_request(job.prompt_token_ids, params, str(i))
        llm.step()
    scheduler = llm.scheduler
    return steps, (
        scheduler.num_cached_tokens,
        scheduler.num_preemptions,
        scheduler.num_swapped_blocks,
    )


LENGTHS = lognormal(40, 12, max_model_len=200)
CRAMPED = workload(all_at_once(), fixed(20, 60), 8)  # room for their prompts, not for their answers
WORKLOADS = {
    "one after the other": (workload([1.5 * i for i in range(12)], LENGTHS, 12), {}),
    "shared prefixes": (
        shared_prefix(
            [6.0 * i for i in range(9)], fixed(30, 20), 9, num_prefixes=2, prefix_tokens=40
        ),
        {},
    ),
    "recompute": (CRAMPED, {"num_blocks": 16}),
    "swap": (CRAMPED, {"num_blocks": 16, "preemption_mode": "swap", "swap_gib": 0.05}),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_simulator_takes_the_steps_of_the_engine(name):
    jobs, options = WORKLOADS[name]
    jobs = [job._replace(max_tokens=job.num_outputs) for job in jobs]
    steps, counts = played(jobs, **OPTIONS | options)
    config = Config(model=EMBEDDED_MODEL, **OPTIONS | options)
    run = simulate(jobs, config, Seconds(Hardware("a clock", 1.0, 1.0, 0.0)), keep_steps=True)
    assert [[item[:2] for item in step.items] for step in run.steps] == steps
    assert (run.num_cached_tokens, run.num_preemptions, run.num_swapped_blocks) == counts
    counted = dict(zip(("shared prefixes", "recompute", "swap"), counts))
    assert counted.get(name, 1) > 0


# --- pairs of policies ---


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
