"""The same conversations for real replicas and for simulated ones.

Run: pytest tests/server/test_routers_compared.py [--slow]
"""

import pytest

from nanovllm.simulator.machines import MACHINES
from tests.tools.extras import needs
from tutorials.performance import replicas

USERS = 6


@pytest.fixture(scope="module")
def jobs():
    return replicas.conversations(USERS, seed=3)


def test_a_turn_begins_with_all_that_was_said_before(jobs):
    users = replicas.of_each_user(jobs)
    assert [len(turns) for turns in users] == [replicas.TURNS] * USERS
    for i, turns in enumerate(users):
        prompts = [job.prompt_token_ids for job in turns]
        assert turns[0].after is None
        for turn, (job, prompt) in enumerate(zip(turns[1:], prompts[1:]), 1):
            assert job.after == i * replicas.TURNS + turn - 1
            assert len(prompt) - len(prompts[turn - 1]) == replicas.QUESTION + replicas.ANSWER
            assert prompt[: len(prompts[turn - 1])] == prompts[turn - 1]
    assert max(max(job.prompt_token_ids) for job in replicas.conversations(24, 0)) < 1000
    firsts = {turns[0].prompt_token_ids[0] for turns in users}
    assert len(firsts) == USERS, "two users begin alike"
    assert replicas.conversations(USERS, seed=3) == jobs != replicas.conversations(USERS, seed=4)


def test_a_machine_as_busy_as_the_real_one(jobs):
    alone = replicas.simulated("RoundRobin", jobs, MACHINES["cpu"])["turns_per_second"]
    machine = replicas.as_busy(jobs, 0.6 * alone)
    assert machine.seconds_per_step > MACHINES["cpu"].seconds_per_step
    busy = replicas.simulated("RoundRobin", jobs, machine)["turns_per_second"]
    assert busy == pytest.approx(0.6 * alone, rel=0.05)


def test_simulated_users_stay_with_their_replica(jobs):
    """Of the second to the sixth prompt, all before the question is found, in full blocks."""
    found = replicas.simulated("PrefixAffinity", jobs, MACHINES["cpu"])
    prompts = [len(job.prompt_token_ids) for job in jobs[: replicas.TURNS]]
    known = [(length - replicas.QUESTION - replicas.ANSWER) // 16 * 16 for length in prompts]
    assert found["hit_rate"] == pytest.approx(sum(known) / sum(prompts), abs=0.02)


@pytest.mark.slow
def test_real_replicas_find_as_much_as_simulated_ones(jobs):
    needs("ray")
    real = replicas.measure("PrefixAffinity", jobs)
    simulated = replicas.simulated("PrefixAffinity", jobs, MACHINES["cpu"])
    assert real["hit_rate"] == pytest.approx(simulated["hit_rate"], abs=0.05)
    assert real["turns_per_second"] > 0 and real["ttft_ms"]["mean"] > 0
