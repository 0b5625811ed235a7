"""Clients share a scheduler: one alone has all of it, and each has its part once others wait.

Run: pytest tests/fairness/test_shares.py [-k memory]
"""

import random
from collections import Counter

import pytest
from fake_engine import check_clean, new_llm, result
from fake_model import FakeRunner
from scheduling import new_request, new_scheduler, step

from nanovllm import LLM, SamplingParams
from nanovllm.topics.fairness.shares import FairShares


def shared(*requests, **options):
    """A scheduler with these requests, each (client, tokens of the prompt, n), and its model."""
    scheduler = new_scheduler(cls=FairShares, **options)
    add(scheduler, *requests)
    return scheduler, FakeRunner(4)


def add(scheduler, *requests) -> None:
    for i, (client, num_tokens, n) in enumerate(requests, len(scheduler.unfinished())):
        request = new_request(i, [i] * num_tokens, 40, n=n)
        request.client = client
        scheduler.add(request)


def seats(scheduler) -> Counter:
    held: Counter = Counter()
    for request in scheduler.running:
        held[request.client] += request.most_sequences
    return held


def test_a_client_alone_holds_all_seats_and_gives_up_what_another_one_needs():
    """Not for a request that is larger than a share, and not an urgent one."""
    scheduler, runner = shared(*[("a", 3, 2)] * 6)
    step(scheduler, runner)
    add(scheduler, ("c", 3, 5))
    step(scheduler, runner)
    assert seats(scheduler) == {"a": 8} and scheduler.num_preemptions == 0
    scheduler.abort(scheduler.waiting[-1])
    add(scheduler, ("b", 3, 1))
    for request in scheduler.running:
        request.user_priority = -1
    step(scheduler, runner)
    assert seats(scheduler) == {"a": 8}
    for request in scheduler.running:
        request.user_priority = 0
    step(scheduler, runner)
    assert seats(scheduler) == {"a": 6, "b": 1} and scheduler.num_preemptions == 1
    add(scheduler, *[("b", 3, 1)] * 9)
    for _ in range(3):
        step(scheduler, runner)
    assert seats(scheduler) == {"a": 4, "b": 4}
    assert [one.request_id for one in scheduler.running if one.client == "a"] == ["0", "1"]


def test_memory_is_shared_too():
    """Four of eight seats, and all blocks."""
    scheduler, runner = shared(*[("a", 15, 1)] * 4, num_blocks=16, tokens=64)
    step(scheduler, runner)
    assert scheduler.block_manager.num_free_blocks == 0
    add(scheduler, ("b", 3, 1))
    step(scheduler, runner)
    assert seats(scheduler) == {"a": 3, "b": 1}
    held = []
    for _ in range(30):  # the answers grow: the client that holds more gives way
        step(scheduler, runner)
        held.append(seats(scheduler)["b"])
    assert held.count(1) >= 27 and scheduler.num_preemptions <= 8


def test_clients_take_turns():
    scheduler, runner = shared(*[("a", 8, 1)] * 4, ("b", 8, 1), ("c", 8, 1), tokens=16)
    plans = [{name for name, _ in step(scheduler, runner)} for _ in range(3)]
    assert plans[0] == {"0", "4"} and {"0", "4", "5"} <= plans[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 40}, {"num_blocks": 40, "num_host_blocks": 99}]
)
def test_answers_are_the_same_as_without_it(options, overlap):
    rng = random.Random(5)
    prompts = [[rng.randrange(9) for _ in range(rng.randrange(1, 30))] for _ in range(40)]
    params = [SamplingParams(seed=i, n=1 + i % 4 // 3, max_tokens=9 + i % 31) for i in range(40)]
    expected = new_llm().generate(prompts, params, use_tqdm=False)
    llm = new_llm(scheduler_cls=FairShares, overlap=overlap, **options)
    states = []
    for i, (prompt, one) in enumerate(zip(prompts, params)):
        request = llm.inputs.request(prompt, one)
        request.client = "abc"[i // 20 + (i % 5 == 0)]
        states.append(llm._submit(request, is_reported=False))
        llm.step()
    while llm.requests:
        llm.step()
    assert [result(state.final_output()) for state in states] == [*map(result, expected)]
    assert llm.stats()["preemptions"] > 0 and llm.overlaps == overlap
    assert type(LLM(runner=llm.runner, scheduler_cls=FairShares).planner) is FairShares  # no checks
    check_clean(llm)
