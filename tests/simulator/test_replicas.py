"""Several replicas in the simulator: each serves its part as if it were alone, and the router sees what is true at that
moment, and nothing of the future.

Run: pytest tests/simulator/test_replicas.py
"""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import MACHINES, Job, LeastLoaded, PrefixAffinity, RoundRobin, Router, simulate
from nanovllm.config import Config
from nanovllm.schedule import ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.topics.simulator.cost_model import LINKS, SHAPES, shape_of
from tutorials.simulation.workloads import gamma, lognormal, multi_turn, poisson, workload

SMALL = Config(model="qwen3-0.6b", num_blocks=300, block_size=16, max_model_len=2048)


class Drawn(Router):
    """Sends jobs anywhere, and notes what it was told."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rng = random.Random(0)
        self.seen = []

    def choose(self, request, loads):
        name = self.rng.choice([*loads])
        self.seen.append((int(request.request_id), request.arrival_time, loads))
        return name


def times(run, indices=None):
    indices = range(len(run.requests)) if indices is None else indices
    return [list(run.requests[i].token_times) for i in indices]


def short(seed: int = 0):
    return lognormal(60, 15, max_model_len=400, seed=seed)


def independent(count: int, rate: float = 200) -> list[Job]:
    return workload(gamma(rate, cv=2), short(), count)


def conversations(count: int, seed: int = 0, **fields) -> list[Job]:
    fields = {"turns": 4, "think": 0.1, "max_model_len": 2048, **fields}
    return multi_turn(poisson(100, seed), short(seed), count, seed=seed, **fields)


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_round_robin_is_so_many_simulations(num_replicas):
    jobs = independent(200)
    run = simulate(jobs, SMALL, check=True, replicas=num_replicas, router_cls=RoundRobin)
    alone = []
    for i in range(num_replicas):
        mine = [j for j, served in enumerate(run.requests) if served.replica == i]
        assert len({j % num_replicas for j in mine}) == 1
        alone.append(simulate([jobs[j] for j in mine], SMALL))
        assert times(alone[-1]) == times(run, mine)
    assert run.num_steps == sum(one.num_steps for one in alone)
    assert run.busy_seconds == pytest.approx(sum(one.busy_seconds for one in alone))
    assert run.seconds == max(one.seconds for one in alone)
    assert run.num_preemptions == sum(served.num_preemptions for served in run.requests)
    if num_replicas > 1:
        assert [part.num_steps for part in run.replicas] == [one.num_steps for one in alone]
        used = sum(one.kv_use * one.busy_seconds for one in alone)
        assert run.kv_use == pytest.approx(used / run.busy_seconds)


def test_conversations_over_replicas():
    """A turn comes some time after the end of the last one, wherever that was; and each replica does with what comes
    to it just what it would do alone."""
    jobs = conversations(60)
    run = simulate(jobs, SMALL, check=True, replicas=3, router_cls=Drawn)
    for job, served in zip(jobs, run.requests):
        assert len(served.token_times) == job.num_outputs
        if job.after is not None:
            before = run.requests[job.after]
            assert served.arrival == before.token_times[-1] + job.time
    assert {served.replica for served in run.requests} == {0, 1, 2}
    for name in range(3):
        mine = [i for i, served in enumerate(run.requests) if served.replica == name]
        mine.sort(key=lambda i: run.requests[i].arrival)
        alone = [jobs[i]._replace(time=run.requests[i].arrival, after=None) for i in mine]
        assert times(simulate(alone, SMALL)) == times(run, mine)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6))
def test_a_router_sees_what_is_true_now(seed, num_replicas):
    """Not what a replica's clock, which may be ahead by a step, says already."""
    jobs = conversations(20, seed)
    routers = []

    class Noted(Drawn):
        def __init__(self, *args):
            super().__init__(*args)
            routers.append(self)

    run = simulate(jobs, SMALL, replicas=num_replicas, router_cls=Noted)
    (router,) = routers
    assert len(router.seen) == len(jobs)
    assert [now for _, now, _ in router.seen] == sorted(now for _, now, _ in router.seen)
    came: list[int] = []
    for index, now, loads in router.seen:
        there = [run.requests[i] for i in came if run.requests[i].token_times[-1] > now]
        counted = Counter(served.replica for served in there)
        assert loads == {name: counted[name] for name in range(num_replicas)}
        came.append(index)


def test_affinity_finds_what_others_lose():
    jobs = conversations(60)
    config = replace(SMALL, num_blocks=4000)
    rates = {}
    for cls in (RoundRobin, LeastLoaded, PrefixAffinity):
        run = simulate(jobs, config, check=True, replicas=4, router_cls=cls)
        rates[cls] = run.num_cached_tokens / run.num_prompt_tokens
    assert rates[PrefixAffinity] > 1.5 * max(rates[RoundRobin], rates[LeastLoaded])


@pytest.mark.parametrize("replicas", [0, -1, 1.5, True, "2", None, 10**9])
def test_no_replicas(replicas):
    with pytest.raises(ValueError, match="replicas=.* it must be an integer from 1 to 4096"):
        simulate(independent(3), SMALL, replicas=replicas)


class Nobody(Router):
    def choose(self, request, loads):
        return 7


class Spoils(Router):
    """What it gets is a copy."""

    def choose(self, request, loads):
        name = min(loads, key=loads.get)
        loads.clear()
        return name


def test_a_router_that_is_wrong():
    message = r"Nobody\.choose\(\): 7 is not one of \[0, 1\]"
    with pytest.raises(ScheduleError, match=message):
        simulate(independent(3), SMALL, replicas=2, router_cls=Nobody)
    run = simulate(independent(30), SMALL, check=True, replicas=2, router_cls=Spoils)
    assert all(served.token_times for served in run.requests)
    message = "router_cls=.* must be a subclass of nanovllm.topics.routing.Router"
    with pytest.raises(ValueError, match=message):
        simulate(independent(3), SMALL, replicas=2, router_cls=Scheduler)
    with pytest.raises(NotImplementedError):
        simulate(independent(3), SMALL, replicas=2, router_cls=Router)


# --- tensor parallelism in the cost model ---


def test_a_rank_has_its_part():
    whole = shape_of(SHAPES["qwen3-32b"], itemsize=2)
    assert whole.weight_bytes == pytest.approx(65.5e9, rel=0.01)
    for num_ranks in (1, 2, 4, 8):
        part = whole.shard(num_ranks)
        assert part.weight_bytes == pytest.approx(whole.weight_bytes / num_ranks, rel=1e-4)
        assert part.kv_bytes * num_ranks == whole.kv_bytes
        assert part.hidden == whole.hidden and part.layers == whole.layers
    assert whole.shard(16).kv_heads == 1  # there are eight: two ranks have the same one
    assert whole.shard(16).kv_bytes * 8 == whole.kv_bytes
    for num_ranks in (3, 5, 128):
        message = rf"tensor_parallel_size={num_ranks} .* 64 query heads"
        with pytest.raises(ValueError, match=message):
            whole.shard(num_ranks)


def test_a_step_of_several_ranks_by_hand():
    """One token: each rank reads its weights; then come two all-reduces per layer and one for the embedding, of
    5,120 numbers, and the first rank gathers its part of the logits from each other one."""
    machine = MACHINES["h100"]
    whole = shape_of(SHAPES["qwen3-32b"], itemsize=2)
    for num_ranks in (2, 8):
        part = whole.shard(num_ranks)
        args = ([(1, 1)], 1, 0, 0, 16)
        seconds = machine.seconds(part, *args, num_ranks=num_ranks)
        hops = 2 * (num_ranks - 1)
        one = 6.6e-6 + hops * 0.6e-6 + hops / num_ranks * 5120 * 2 / 450e9
        gather = 6.6e-6 + 0.6e-6 + (num_ranks - 1) * 151936 / num_ranks * 2 / 450e9
        assert seconds - machine.seconds(part, *args) == pytest.approx(129 * one + gather)
        slower = replace(machine, link=LINKS["network"])
        assert slower.seconds(part, *args, num_ranks=num_ranks) > seconds
    assert machine.seconds(whole, *args, num_ranks=1) == machine.seconds(whole, *args)


def test_ranks_make_a_step_faster():
    jobs = [Job(0.0, ((1, 20),), 30)]
    configs = [Config(model="qwen3-32b", tensor_parallel_size=n) for n in (1, 2, 8)]
    one, two, eight = (simulate(jobs, config).seconds for config in configs)
    assert eight < 0.5 * two < 0.5 * 0.6 * one
