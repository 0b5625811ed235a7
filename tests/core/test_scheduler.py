"""Which requests run in a step and which are preempted; under random loads, every request still gets its own tokens.

Run: pytest tests/core/test_scheduler.py [-k preempted]
"""

import random
from collections import Counter

import pytest
from fake_model import FakeRunner, expected_output, next_token
from hypothesis import HealthCheck, given, settings
from scenarios import AnyPolicy, play, scenarios
from scheduling import drain, new_request, new_scheduler, step

from nanovllm.device.overlap import pending
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.topics.checks.blocks import check_blocks


def check_tokens(*requests, vocab_size: int = 50) -> None:
    """Each sequence has what the model says of it alone. None reaches a model's longest context."""
    for request in requests:
        for seq in request.sequences:
            assert seq.output_token_ids == expected_output(request, seq.index, 512, vocab_size)


def test_decodes_share_a_step_with_the_chunk_of_a_long_prompt():
    scheduler, runner = new_scheduler(tokens=16), FakeRunner(4)
    scheduler.add(new_request(0, [1] * 10))
    scheduler.add(new_request(1, [2] * 30))
    assert step(scheduler, runner) == [("0", 10), ("1", 6)]
    assert step(scheduler, runner) == [("0", 1), ("1", 15)]
    assert step(scheduler, runner) == [("0", 1), ("1", 9)]
    assert step(scheduler, runner) == [("0", 1), ("1", 1)]
    assert step(scheduler, runner) == [("1", 1)]  # request 0 has its four tokens


def test_a_block_is_cached_once_its_last_token_is_no_longer_pending():
    """The step behind the one in flight computes a token that the host has not read."""
    scheduler = new_scheduler(tokens=16)
    scheduler.add(new_request(0, [5, 6, 7]))
    schedule = scheduler.schedule()
    scheduler.advance(schedule)
    with pending(schedule):
        scheduler.advance(scheduler.schedule())
    cached = scheduler.block_manager.cached_blocks
    assert not cached
    scheduler.update(schedule, [8])
    assert [token_ids for _, token_ids in cached] == [(5, 6, 7, 8)]
    ending = new_scheduler(tokens=16)
    ending.add(new_request(0, [5, 6, 7], max_tokens=1))
    schedule = ending.schedule()
    ending.advance(schedule)
    with pending(schedule):
        assert not ending.schedule().items  # the last token of an answer is not fed to the model


def test_max_num_seqs_bounds_the_batch():
    scheduler, runner = new_scheduler(seqs=3), FakeRunner(4)
    for i in range(5):
        scheduler.add(new_request(i, [i] * 2, n=2 if i == 1 else 1))
    assert step(scheduler, runner) == [("0", 2), ("1", 2)]  # request 1 will have two sequences
    assert step(scheduler, runner) == [("0", 1), ("1", 1), ("1", 1)]
    scheduler = new_scheduler(seqs=3)
    for i in range(3):
        scheduler.add(new_request(i, [i] * 2))
    scheduler.waiting[0].__class__ = type("Search", (Request,), {"most_sequences": 2})
    assert step(scheduler, runner) == [("0", 2), ("1", 2)]
    assert step(scheduler, runner) == [("0", 1), ("1", 1)]  # request 0 may fork at any step


def test_a_sample_that_has_ended_leaves_its_seat_and_its_blocks():
    """Five of six blocks are in use; what forked has its own already."""
    scheduler, runner = new_scheduler(num_blocks=6, seqs=3), FakeRunner(4)
    samples = new_request(0, 8, max_tokens=4, n=3)
    scheduler.add(samples)
    step(scheduler, runner)
    scheduler.add(new_request(1, [9] * 7))
    assert len(step(scheduler, runner)) == 3
    scheduler.finish(samples.sequences[1], "stop")
    assert scheduler.running == [samples] and scheduler.block_manager.num_free_blocks == 2
    assert step(scheduler, runner) == [("0", 1), ("0", 1), ("1", 7)]


def test_last_arrived_is_preempted_and_comes_back():
    scheduler, runner = new_scheduler(num_blocks=4, block_size=4), FakeRunner(4)
    first, second, third = (new_request(i, [i] * 7, max_tokens=6) for i in range(3))
    for request in (first, second, third):
        scheduler.add(request)
    plans = [step(scheduler, runner) for _ in range(3)]
    assert plans == [[("0", 7), ("1", 7)], [("0", 1), ("1", 1)], [("0", 1)]]
    assert scheduler.waiting == [second, third]  # in the order of arrival
    assert scheduler.num_preemptions == 1
    assert second.sequences[0].block_table == []
    drain(scheduler, runner)
    check_tokens(first, second, third, vocab_size=3)
    assert scheduler.block_manager.num_used_blocks == 0


def test_no_request_is_admitted_in_a_step_that_preempts():
    """Else a smaller one would come into the blocks that were just taken from the victim."""
    scheduler = new_scheduler(num_blocks=5, tokens=8, enable_prefix_caching=False)
    runner = FakeRunner(4)
    scheduler.add(new_request(0, [1] * 8, max_tokens=8))
    scheduler.add(new_request(1, [2] * 7, max_tokens=8))
    plans = [step(scheduler, runner) for _ in range(3)]
    assert plans == [[("0", 8)], [("0", 1), ("1", 7)], [("0", 1), ("1", 1)]]
    scheduler.add(new_request(-1, [3] * 3))
    assert step(scheduler, runner) == [("0", 1)]
    assert scheduler.num_preemptions == 1 and scheduler.block_manager.num_free_blocks == 2
    assert [request.arrival for request in scheduler.waiting] == [-1, 1]


def test_a_part_of_the_blocks_stays_free_for_running_requests():
    """Two of forty blocks, the watermark: so the third request waits for the first, and nothing is preempted."""
    scheduler, runner = new_scheduler(num_blocks=40, max_model_len=200, tokens=200), FakeRunner(4)
    for i, length in enumerate([76, 72, 8]):
        scheduler.add(new_request(i, [i] * length, max_tokens=2))
    plans = [step(scheduler, runner) for _ in range(3)]
    assert plans == [[("0", 76), ("1", 72)], [("0", 1), ("1", 1)], [("2", 8)]]


@pytest.mark.parametrize("tokens", [3, 5, 11, 64])
def test_a_request_is_admitted_when_its_whole_prompt_fits(tokens):
    """Looking at its first chunk only, each is preempted by the next chunk of another, and begins
    again."""
    scheduler = new_scheduler(num_blocks=11, tokens=tokens, enable_prefix_caching=False)
    for i in range(6):
        scheduler.add(new_request(i, [i] * 21, max_tokens=4))
    computed, _ = drain(scheduler, FakeRunner(4, vocab_size=50))
    assert computed == 6 * (21 + 3) and scheduler.num_preemptions == 0
    scheduler, runner = new_scheduler(num_blocks=7, tokens=64), FakeRunner(4)
    scheduler.add(new_request(0, 17, max_tokens=8))
    step(scheduler, runner)
    scheduler.add(new_request(1, 18))
    assert len(step(scheduler, runner)) == 2  # four blocks of its prompt are in use already


@pytest.mark.parametrize("n", [1, 3])
def test_admission_takes_the_blocks_of_all_tokens(n):
    """Also of chunks to come, and of samples that come back. Tokens are counted the first time only."""
    scheduler, runner = new_scheduler(tokens=3), FakeRunner(4, vocab_size=50)
    request = new_request(0, 8, max_tokens=24, n=n)
    scheduler.add(request)
    step(scheduler, runner)
    assert len(request.sequences[0].block_table) == 2
    assert request.has_forked == (n == 1), "a single sequence has its own blocks"
    while len(request.sequences[0]) < 16:
        step(scheduler, runner)
    scheduler.preempt(request)
    assert not request.has_forked
    scheduler.schedule()
    assert request.has_forked and [len(seq.block_table) for seq in request.sequences] == [4] * n
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (8, 0)


@pytest.mark.parametrize("tokens, computed, peak", [(400, 384, 32), (64, 384, None)])
def test_equal_prefixes_share_within_a_step(tokens, computed, peak):
    """One system prompt, 16 questions at once: it is computed once, also if it takes several
    steps."""
    scheduler = new_scheduler(
        num_blocks=300, block_size=16, tokens=tokens, seqs=16, max_model_len=512
    )
    runner = FakeRunner(16)
    requests = [new_request(i, [*range(256), *[300 + i] * 8], max_tokens=1) for i in range(16)]
    for request in requests:
        scheduler.add(request)
    found = drain(scheduler, runner)
    assert found[0] == computed and peak in (None, found[1])
    check_tokens(*requests, vocab_size=3)


@pytest.mark.parametrize("prompt, shared, copies", [(8, 2, 0), (9, 3, 2), (3, 1, 2)])
def test_samples_share_the_blocks_of_the_prompt(prompt, shared, copies):
    """The prompt is computed once. A partly filled last block is copied by all but one: the last
    has it for itself."""
    scheduler, runner = new_scheduler(), FakeRunner(4)
    request = new_request(0, prompt, n=3)
    scheduler.add(request)
    assert step(scheduler, runner) == [("0", prompt)]
    assert scheduler.block_manager.num_used_blocks == shared
    assert not scheduler.block_manager.unwritten  # the step has written them
    assert all(len(s) == prompt + 1 for s in request.sequences)
    schedule = scheduler.schedule()
    assert [item.num_tokens for item in schedule.items] == [1, 1, 1]
    assert len(schedule.moves.copies) == copies
    assert scheduler.block_manager.num_used_blocks == prompt // 4 + 3
    scheduler.update(schedule, *runner.run(schedule))
    drain(scheduler, runner)
    check_tokens(request, vocab_size=3)
    assert scheduler.num_prompt_tokens == prompt and scheduler.block_manager.num_used_blocks == 0


def test_a_sample_that_has_ended_does_not_come_back_with_the_others():
    scheduler, runner = new_scheduler(num_blocks=12, tokens=32), FakeRunner(4)
    scheduler.add(new_request(0, [1] * 4, max_tokens=24))
    second = new_request(1, [*range(14)], max_tokens=8, n=3)
    scheduler.add(second)
    for _ in range(3):
        step(scheduler, runner)
    scheduler.finish(second.sequences[0], "stop")
    scheduler.preempt(second)
    drain(scheduler, runner)
    assert second.sequences[0].block_table == []
    assert scheduler.block_manager.num_used_blocks == 0
    assert all(seq.num_output_tokens == 8 for seq in second.sequences[1:])


def test_samples_that_were_preempted_share_again():
    """When they come back, the first sequence computes the prompt, and the others what is their
    own."""
    scheduler = new_scheduler(num_blocks=12, tokens=32, enable_prefix_caching=False)
    runner = FakeRunner(4)
    scheduler.add(new_request(0, [1] * 4, max_tokens=24))
    second = new_request(1, [*range(10), 1, 1, 1, 1], max_tokens=8, n=3)
    scheduler.add(second)
    while not scheduler.num_preemptions:
        step(scheduler, runner)
    lengths, computed = [len(seq) for seq in second.sequences], 0
    while max(len(seq) for seq in second.sequences) == lengths[0]:
        computed += dict(reversed(step(scheduler, runner))).get("1", 0)
    assert len({*lengths}) == 1 and all(len(seq) == lengths[0] + 1 for seq in second.sequences)
    drain(scheduler, runner)
    check_tokens(second, vocab_size=3)


@pytest.mark.parametrize("n", [1, 3])
def test_a_preempted_request_finds_its_own_blocks(n):
    scheduler = new_scheduler(num_blocks=20, tokens=64, max_model_len=200)
    runner = FakeRunner(4, vocab_size=50)
    request = new_request(0, 8, max_tokens=24, n=n)
    scheduler.add(request)
    for _ in range(18):
        step(scheduler, runner)
    scheduler.preempt(scheduler.running[-1])
    plan = step(scheduler, runner) + step(scheduler, runner)
    computed = sum(n for _, n in plan)
    assert all(len(seq) >= 26 for seq in request.sequences)
    assert computed <= 5 * n  # at most a block for each, and a step
    drain(scheduler, runner)
    check_tokens(request)


def test_what_the_cache_still_has_is_not_swapped_in():
    """The blocks of a preempted request stay cached until they are overwritten."""
    scheduler, runner = new_scheduler(num_blocks=12, tokens=64, num_host_blocks=12), FakeRunner(4)
    request = new_request(0, range(18), max_tokens=9)
    scheduler.add(request)
    step(scheduler, runner)
    scheduler.preempt(scheduler.running[-1])
    moves = scheduler.block_manager.take_moves()
    assert len(moves.swaps_out) == 5 and len(request.sequences[0].host_table) == 5
    runner.swap(moves.swaps_out, {})
    # overwrites the last two of the four full blocks
    filler = new_request(1, [9] * 38, max_tokens=1)
    filler.arrival = -1
    scheduler.add(filler)
    schedule = scheduler.schedule()
    (host_blocks,) = [seq.host_table for seq in request.sequences]
    assert schedule.items == [(filler.sequences[0], 0, 38)] and len(host_blocks) == 5
    scheduler.update(schedule, *runner.run(schedule))
    schedule = scheduler.schedule()
    assert list(schedule.moves.swaps_in) == host_blocks[2:]
    assert scheduler.num_swapped_blocks == 0  # only those out count, and these were taken by hand
    assert schedule.items == [(request.sequences[0], 18, 1)]
    check_blocks(scheduler.block_manager, request.sequences)  # all host blocks are free
    scheduler.update(schedule, *runner.run(schedule))
    drain(scheduler, runner)
    check_tokens(request, vocab_size=3)


@pytest.mark.parametrize("shared", [3, 4, 5, 8, 12])
def test_hits_are_counted_out_of_the_first_chunk(shared):
    scheduler, runner = new_scheduler(tokens=12), FakeRunner(4)
    scheduler.add(new_request(0, 12, max_tokens=1))
    step(scheduler, runner)
    second = new_request(1, [*range(shared), *range(50, 62 - shared)])
    scheduler.add(second)
    hit = min(shared, 11) // 4 * 4
    assert step(scheduler, runner) == [("1", 12 - hit)]
    assert second.num_cached_tokens == scheduler.num_cached_tokens == hit
    assert scheduler.num_prompt_tokens == 24


def test_abort_in_every_state():
    scheduler, runner = new_scheduler(num_blocks=30, seqs=5, num_host_blocks=9), FakeRunner(4)
    requests = [new_request(i, [i] * 7, max_tokens=9, n=i or 1) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    for _ in range(3):
        step(scheduler, runner)
    scheduler.preempt(requests[2])
    assert all(seq.host_table for seq in requests[2].sequences)  # all samples are swapped out
    scheduler.schedule()
    assert scheduler.num_swapped_blocks == 3 and requests[2] in scheduler.running
    scheduler.preempt(requests[2])
    late = new_request(3, 3)
    scheduler.add(late)
    for request in [*requests, late]:  # running, running, on the host, waiting
        for _ in range(2):
            scheduler.abort(request)
        assert request.sequences[0].finish_reason == "abort"
    assert not scheduler.has_unfinished()
    check_blocks(scheduler.block_manager, [])


@pytest.mark.parametrize(
    "prompt, max_tokens, n, message",
    [
        (64, 1, 1, "the prompt has 64 tokens, but max_model_len=64"),
        (3, 4, 9, "n=9 is not allowed: it must be at most max_num_seqs=8"),
        (3, 4, 7, "n=7 is not allowed: it must be at most max_num_batched_tokens=6"),
        (
            20,
            30,
            1,
            r"may need 13 KV blocks of 4 tokens \(prompt of 20 tokens, max_tokens=30, n=1\), but num_blocks=10",
        ),
        (10, 9, 4, "may need 14 KV blocks"),
    ],
)
def test_what_can_never_fit_is_refused(prompt, max_tokens, n, message):
    scheduler = new_scheduler(num_blocks=10, tokens=6)
    with pytest.raises(ValueError, match=message):
        scheduler.add(new_request(0, prompt, max_tokens, n))
    assert not scheduler.has_unfinished()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios)
def test_whatever_happens_every_request_gets_its_own_tokens(scenario):
    play(*scenario)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios)
def test_whatever_the_policy_every_request_gets_its_own_tokens(scenario):
    play(*scenario, cls=AnyPolicy)


@pytest.mark.slow
def test_the_same_under_heavy_load(pytestconfig):
    """Hypothesis prefers small cases, in which memory is seldom scarce."""
    events, total = Counter(), 200 if pytestconfig.getoption("--slow") else 60
    for seed in range(total):
        rng = random.Random(seed)
        arrivals = [
            (
                rng.randint(0, 20),
                [rng.randint(0, 2) for _ in range(rng.randint(1, 13))],
                rng.randint(4, 15),
                rng.choice([(), (2,)]),
                rng.randint(1, 3),
                rng.random() < 0.4,
                rng.choice([None, None, None, rng.randint(0, 20)]),
            )
            for _ in range(12)
        ]
        failures = {rng.randint(1, 60)} if rng.random() < 0.2 else set()
        options = (rng.random() < 0.5, rng.choice([0, 4, 12, 100]), failures, seed % 2)
        sizes = rng.randint(1, 5), rng.randint(3, 20), rng.randint(3, 9), rng.randint(0, 3)
        events += play(arrivals, *sizes, *options)
        play(arrivals, *sizes, *options, cls=AnyPolicy)
    assert min(events.values()) >= total // 10 and len(events) == 9, events


# --- blocks that are reserved, shared and swapped ---


def forget_the_cache(scheduler) -> None:
    """As if all had been overwritten."""
    scheduler.block_manager.cached_blocks.clear()
    for block in scheduler.block_manager.blocks:
        block.key = block.prefix_id = None


@pytest.mark.parametrize(
    "tokens, num_free, last_plan", [(7, 14, [("0", 1)]), (10, 14, [("0", 8)]), (10, 17, [("0", 8)])]
)
def test_blocks_of_samples_that_have_not_forked_are_reserved(tokens, num_free, last_plan):
    """3 x 23 tokens, 8 of them shared: 6 + 2 x 4 blocks. Also when the first sample has 2 of its 6: the blocks for its
    own tokens are reserved, too."""
    scheduler = new_scheduler(num_blocks=40, tokens=tokens, enable_prefix_caching=False)
    runner = FakeRunner(4, vocab_size=50)
    samples, filler = new_request(0, 8, max_tokens=20, n=3), new_request(1, [9] * 20, max_tokens=1)
    scheduler.add(samples)
    while samples.sequences[0].num_output_tokens < 15:
        step(scheduler, runner)
    scheduler.preempt(scheduler.running[-1])
    scheduler.add(filler)
    manager = scheduler.block_manager
    hidden = list(manager.free_blocks)[num_free:]
    for block in hidden:
        del manager.free_blocks[block]
    while not samples.has_forked:
        plan = step(scheduler, runner)
    assert plan == last_plan and scheduler.waiting == [filler]
    manager.free_blocks.update(dict.fromkeys(hidden))
    drain(scheduler, runner)
    assert scheduler.num_preemptions == 1
    check_tokens(samples)


def test_what_is_shared_anyway_is_not_swapped_in():
    """A sample that had to begin at a block's border (see fork) was swapped out before it had all that it shares."""
    scheduler, runner = (
        new_scheduler(num_blocks=30, tokens=64, num_host_blocks=30),
        FakeRunner(4, vocab_size=50),
    )
    request = new_request(1, 7, max_tokens=9, n=2)
    scheduler.add(request)
    for _ in range(4):
        step(scheduler, runner)
    manager, (first, second) = scheduler.block_manager, request.sequences
    manager.free(second)
    manager.fork(first, second, 4)
    manager.allocate(second, 1)
    runner.write(second, second.num_computed_tokens, 1)
    second.num_computed_tokens += 1
    scheduler.preempt(scheduler.running[-1])
    runner.swap(manager.take_moves().swaps_out, {})
    forget_the_cache(scheduler)
    needed = list(first.host_table)
    schedule = scheduler.schedule()
    assert second.num_computed_tokens == request.num_shared_tokens == 7
    assert list(schedule.moves.swaps_in) == needed
    scheduler.update(schedule, *runner.run(schedule))
    drain(scheduler, runner)
    check_tokens(request)


# --- one prompt, twice in the cache, both copies in one request ---


class UrgentFirst(Scheduler):
    def priority(self, request):
        return request.request_id != "0", request.arrival


def samples_with_two_copies_of_their_prompt(**manager):
    """Preempted, they compute the last block of their prompt again, in chunks. Another request is a
    step faster: the first sample keeps its own block, and the second one finds the other."""
    scheduler = new_scheduler(num_blocks=6, tokens=8, cls=UrgentFirst, **manager)
    runner = FakeRunner(4, vocab_size=50)
    beginning = list(range(1, 8))
    samples = new_request(1, [*beginning, next_token(tuple(beginning), 0, 50)], max_tokens=8, n=2)
    scheduler.add(samples)
    step(scheduler, runner)
    scheduler.preempt(scheduler.running[-1])
    for seq in samples.sequences:
        scheduler._free_host(seq)  # it had no room there
    forget_the_cache(scheduler)
    scheduler.add(new_request(0, beginning, max_tokens=2))
    assert step(scheduler, runner) == [("0", 7), ("1", 1)]
    assert step(scheduler, runner) == [("0", 1), ("1", 3)]
    assert samples.has_forked
    return scheduler, runner, samples


def test_samples_never_need_more_blocks_than_check_has_said():
    scheduler, runner, samples = samples_with_two_copies_of_their_prompt()
    while scheduler.has_unfinished():
        assert step(scheduler, runner), "an empty step: the engine raises ScheduleError"
    check_tokens(samples)


def test_two_copies_do_not_come_back_from_the_host():
    """can_admit counts one of them."""
    scheduler, runner, samples = samples_with_two_copies_of_their_prompt(num_host_blocks=9)
    while len(samples.sequences[0]) < 13:
        step(scheduler, runner)
    scheduler.preempt(scheduler.running[-1])
    runner.swap(scheduler.block_manager.take_moves().swaps_out, {})
    forget_the_cache(scheduler)
    drain(scheduler, runner)
    check_tokens(samples)
