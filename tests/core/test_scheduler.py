"""Who runs in a step and who is preempted; under random loads, every request still gets its own
tokens.

Run: pytest tests/core/test_scheduler.py [-k preempted]
"""

import random
from collections import Counter

import pytest
from fake_model import FakeRunner, expected_beams, expected_output
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.block_manager import BlockManager
from nanovllm.checks.blocks import check_blocks
from nanovllm.config import Limits
from nanovllm.decoding.beam_search import BeamRequest, BeamSearch, BeamSearchParams
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request


def new_scheduler(
    num_blocks=64, block_size=4, tokens=16, seqs=8, max_model_len=64, cls=Scheduler, **manager
) -> Scheduler:
    limits = Limits(max_num_batched_tokens=tokens, max_num_seqs=seqs, max_model_len=max_model_len)
    return cls(limits, BlockManager(num_blocks, block_size, **manager))


def new_request(arrival: int, prompt, max_tokens=4, n=1, eos=()) -> Request:
    prompt = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    request = Request(str(arrival), None, prompt, SamplingParams(max_tokens=max_tokens, n=n), eos)
    request.arrival = request.seed = arrival
    return request


def step(scheduler: Scheduler, runner: FakeRunner) -> list[tuple[str, int]]:
    """Runs a step; returns (request id, tokens computed) in the order of the batch."""
    schedule = scheduler.schedule()
    plan = [(seq.request.request_id, n) for seq, _, n in schedule.items]
    scheduler.update(schedule, *runner.run(schedule))
    return plan


def test_decodes_share_a_step_with_the_chunk_of_a_long_prompt():
    scheduler, runner = new_scheduler(tokens=16), FakeRunner(4)
    scheduler.add(new_request(0, [1] * 10))
    scheduler.add(new_request(1, [2] * 30))
    assert step(scheduler, runner) == [("0", 10), ("1", 6)]
    assert step(scheduler, runner) == [("0", 1), ("1", 15)]
    assert step(scheduler, runner) == [("0", 1), ("1", 9)]
    assert step(scheduler, runner) == [("0", 1), ("1", 1)]
    assert step(scheduler, runner) == [("1", 1)]  # request 0 has its four tokens


def test_a_request_arriving_later_joins_the_running_batch():
    scheduler, runner = new_scheduler(), FakeRunner(4)
    scheduler.add(new_request(0, 5))
    step(scheduler, runner)
    scheduler.add(new_request(1, [9] * 3))
    assert step(scheduler, runner) == [("0", 1), ("1", 3)]


def test_max_num_seqs_bounds_the_batch():
    scheduler, runner = new_scheduler(seqs=3), FakeRunner(4)
    for i in range(5):
        scheduler.add(new_request(i, [i] * 2, n=2 if i == 1 else 1))
    assert step(scheduler, runner) == [("0", 2), ("1", 2)]  # request 1 will have two sequences
    assert step(scheduler, runner) == [("0", 1), ("1", 1), ("1", 1)]


def test_last_arrived_is_preempted_and_comes_back():
    scheduler, runner = new_scheduler(num_blocks=4, block_size=4), FakeRunner(4)
    first, second = new_request(0, [1] * 7, max_tokens=6), new_request(1, [2] * 7, max_tokens=6)
    scheduler.add(first)
    scheduler.add(second)
    plans = [step(scheduler, runner) for _ in range(3)]
    assert plans == [[("0", 7), ("1", 7)], [("0", 1), ("1", 1)], [("0", 1)]]
    assert scheduler.waiting == [second]
    assert scheduler.num_preemptions == 1
    assert second.sequences[0].block_table == []
    while scheduler.has_unfinished():
        step(scheduler, runner)
    for request in (first, second):
        assert request.sequences[0].output_token_ids == expected_output(request, 0, 64, 3)
    assert scheduler.block_manager.num_used_blocks == 0


def test_nobody_is_admitted_in_a_step_that_preempts():
    """Else a smaller one would come into the blocks that were just taken from the victim."""
    scheduler = new_scheduler(num_blocks=5, tokens=8, enable_prefix_caching=False)
    runner = FakeRunner(4)
    scheduler.add(new_request(0, [1] * 8, max_tokens=8))
    scheduler.add(new_request(1, [2] * 7, max_tokens=8))
    scheduler.add(new_request(2, [3] * 3))
    plans = [step(scheduler, runner) for _ in range(4)]
    assert plans == [[("0", 8)], [("0", 1), ("1", 7)], [("0", 1), ("1", 1)], [("0", 1)]]
    assert scheduler.num_preemptions == 1 and scheduler.block_manager.num_free_blocks == 2


def drain(scheduler: Scheduler, runner: FakeRunner) -> tuple[int, int]:
    """Runs until all is done. Returns how many tokens were computed, and the most blocks in use."""
    computed, peak = 0, 0
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        computed = computed + schedule.num_tokens
        peak = max(peak, scheduler.block_manager.num_used_blocks)
        scheduler.update(schedule, *runner.run(schedule))
    return computed, peak


@pytest.mark.parametrize("tokens", [3, 5, 11, 64])
def test_a_request_is_admitted_when_its_whole_prompt_fits(tokens):
    """Looking at its first chunk only, each is preempted by the next chunk of another, and begins
    again."""
    scheduler = new_scheduler(num_blocks=11, tokens=tokens, enable_prefix_caching=False)
    for i in range(6):
        scheduler.add(new_request(i, [i] * 21, max_tokens=4))
    computed, _ = drain(scheduler, FakeRunner(4, vocab_size=50))
    assert computed == 6 * (21 + 3) and scheduler.num_preemptions == 0


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
    for request in requests:
        assert request.sequences[0].output_token_ids == expected_output(request, 0, 512, 3)


def test_all_sequences_of_a_request_are_preempted_together():
    scheduler = new_scheduler(num_blocks=6, block_size=2, enable_prefix_caching=False)
    runner = FakeRunner(2)
    first = new_request(0, [1] * 3, max_tokens=8)
    second = new_request(1, [2] * 3, max_tokens=3, n=2)
    scheduler.add(first)
    scheduler.add(second)
    while not scheduler.num_preemptions:
        step(scheduler, runner)
    assert scheduler.running == [first]
    assert [seq.block_table for seq in second.sequences] == [[], []]


@pytest.mark.parametrize("prompt, shared, copies", [(8, 2, 0), (9, 3, 2), (3, 1, 2)])
def test_samples_share_the_blocks_of_the_prompt(prompt, shared, copies):
    """The prompt is computed once. A partly filled last block is copied by all but one: the last
    has it for itself."""
    scheduler, runner = new_scheduler(), FakeRunner(4)
    request = new_request(0, prompt, n=3)
    scheduler.add(request)
    assert step(scheduler, runner) == [("0", prompt)]
    assert scheduler.block_manager.num_used_blocks == shared
    assert all(len(s) == prompt + 1 for s in request.sequences)
    schedule = scheduler.schedule()
    assert [item.num_tokens for item in schedule.items] == [1, 1, 1]
    assert len(schedule.moves.copies) == copies
    assert scheduler.block_manager.num_used_blocks == prompt // 4 + 3
    scheduler.update(schedule, *runner.run(schedule))
    while scheduler.has_unfinished():
        step(scheduler, runner)
    for seq in request.sequences:
        assert seq.output_token_ids == expected_output(request, seq.index, 64, 3)
    assert scheduler.num_prompt_tokens == prompt and scheduler.block_manager.num_used_blocks == 0


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
    while scheduler.has_unfinished():
        step(scheduler, runner)
    for seq in second.sequences:
        assert seq.output_token_ids == expected_output(second, seq.index, 64, 3)


def test_samples_that_were_preempted_find_their_own_blocks():
    scheduler = new_scheduler(num_blocks=20, tokens=64, max_model_len=200)
    runner = FakeRunner(4, vocab_size=50)
    request = new_request(0, 8, max_tokens=24, n=3)
    scheduler.add(request)
    for _ in range(18):
        step(scheduler, runner)
    scheduler.preempt(scheduler.running[-1])
    plan = step(scheduler, runner) + step(scheduler, runner)
    computed = sum(n for _, n in plan)
    assert all(len(seq) >= 26 for seq in request.sequences)
    assert computed <= 3 * 4 + 3  # at most a block for each
    while scheduler.has_unfinished():
        step(scheduler, runner)
    for seq in request.sequences:
        assert seq.output_token_ids == expected_output(request, seq.index, 200, 50)


def test_what_the_cache_still_has_is_not_swapped_in():
    """The blocks of a preempted request stay findable until somebody overwrites them."""
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
    assert schedule.items == [(request.sequences[0], 18, 1)]
    assert len(scheduler.block_manager.free_host_blocks) == 12
    scheduler.update(schedule, *runner.run(schedule))
    while scheduler.has_unfinished():
        step(scheduler, runner)
    assert request.sequences[0].output_token_ids == expected_output(request, 0, 64, 3)


def test_a_prefix_of_two_requests_is_swapped_once():
    scheduler, runner = new_scheduler(num_blocks=20, tokens=64, num_host_blocks=20), FakeRunner(4)
    first = new_request(0, [*range(12), 50], max_tokens=9)
    scheduler.add(first)
    step(scheduler, runner)
    second = new_request(1, [*range(12), 60], max_tokens=9)
    scheduler.add(second)
    step(scheduler, runner)
    while scheduler.running:
        scheduler.preempt(scheduler.running[-1])
    moves = scheduler.block_manager.take_moves()
    assert len(moves.swaps_out) == 3 + 1 + 1
    runner.swap(moves.swaps_out, {})
    scheduler.block_manager.findable.clear()  # as if all had been overwritten
    for block in scheduler.block_manager.blocks:
        block.key = block.prefix_id = None
    runner.cache.clear()
    schedule = scheduler.schedule()
    assert len(schedule.moves.swaps_in) == 5 and scheduler.block_manager.num_used_blocks == 5
    scheduler.update(schedule, *runner.run(schedule))
    while scheduler.has_unfinished():
        step(scheduler, runner)
    for request in (first, second):
        assert request.sequences[0].output_token_ids == expected_output(request, 0, 64, 3)


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


def test_a_preempted_request_finds_its_own_blocks_again():
    scheduler, runner = new_scheduler(num_blocks=8, tokens=64), FakeRunner(4)
    scheduler.add(new_request(0, [1] * 15, max_tokens=10))
    scheduler.add(new_request(1, [2] * 15, max_tokens=10))
    while not scheduler.num_preemptions:
        step(scheduler, runner)
    (victim,) = scheduler.waiting
    done = len(victim.sequences[0])
    while victim in scheduler.waiting:
        plan = step(scheduler, runner)
    assert dict(plan)["1"] < done  # not everything is computed again


def test_priority_decides_who_goes_first():
    class ShortestPromptFirst(Scheduler):
        def priority(self, request):
            return len(request.prompt_token_ids)

    scheduler, runner = new_scheduler(seqs=1, cls=ShortestPromptFirst), FakeRunner(4)
    for i, length in enumerate([9, 3, 5]):
        scheduler.add(new_request(i, [i] * length, max_tokens=1))
    assert [step(scheduler, runner) for _ in range(3)] == [[("1", 3)], [("2", 5)], [("0", 9)]]


def test_abort_in_every_state():
    scheduler, runner = new_scheduler(num_blocks=4, seqs=2), FakeRunner(4)
    requests = [new_request(i, [i] * 7, max_tokens=9) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    step(scheduler, runner)
    for request in requests:  # running, running, waiting
        scheduler.abort(request)
        assert request.sequences[0].finish_reason == "abort"
    assert not scheduler.has_unfinished() and scheduler.block_manager.num_used_blocks == 0


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


requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before the next arrival
        # the prompt; few different tokens, so that prefixes are shared
        st.lists(st.integers(0, 2), min_size=1, max_size=13),
        st.sampled_from([15, 9, 4, 2, 1]),  # max_tokens
        st.sampled_from([(), (2,)]),  # tokens that end an output
        st.integers(1, 3),  # n
        st.booleans(),  # whether they are beams
        st.one_of(st.none(), st.integers(0, 6)),  # steps before it is aborted
    ),
    min_size=2,
    max_size=8,
)
VOCAB_SIZE, MAX_MODEL_LEN = 3, 22


def search_for(request: Request, width: int) -> BeamSearch:
    room = min(request.params.max_tokens, MAX_MODEL_LEN - len(request.prompt_token_ids))
    return BeamSearch(BeamSearchParams(beam_width=width), request.stop_token_ids, room)


def with_beams(request: Request) -> BeamRequest:
    """The same request, whose samples are beams."""
    beams = BeamRequest(
        request.request_id,
        None,
        request.prompt_token_ids,
        request.params,
        request.eos_token_ids,
        search=search_for(request, request.params.n),
    )
    beams.arrival = beams.seed = request.arrival
    return beams


def check_results(request: Request) -> None:
    if isinstance(request, BeamRequest):
        expected = expected_beams(request, search_for(request, request.params.n), VOCAB_SIZE)
        found = [(beam.token_ids, beam.cumulative_logprob) for beam in request.search.results]
        assert found == expected or any(seq.finish_reason == "abort" for seq in request.sequences)
        return
    for seq in request.sequences:
        expected = expected_output(request, seq.index, MAX_MODEL_LEN, VOCAB_SIZE)
        if seq.finish_reason == "abort":
            assert seq.output_token_ids == expected[: seq.num_output_tokens]
        else:
            assert seq.output_token_ids == expected
            assert seq.finish_reason == (
                "stop" if expected[-1] in request.stop_token_ids else "length"
            )


def check_plan(scheduler: Scheduler, schedule: Schedule) -> None:
    manager = scheduler.block_manager
    assert schedule.num_tokens <= scheduler.max_num_batched_tokens
    assert len(schedule.items) <= scheduler.max_num_seqs
    if type(scheduler) is Scheduler:  # other policies may wait, and preempt one request for another
        assert bool(schedule.items) == scheduler.has_unfinished()
        assert not (schedule.moves.swaps_out and schedule.moves.swaps_in)
        running = [request.arrival for request in scheduler.running]
        assert running == sorted(running)
    assert all(0 < n <= seq.num_missing_tokens for seq, _, n in schedule.items)
    for request in scheduler.running:
        # all or nothing: sequences of a request have next tokens in the same step
        sampled = {seq for seq in schedule.sampled if seq.request is request}
        assert sampled in (set(), set(request.unfinished))
    sources = {source for source, _ in schedule.moves.copies}
    targets = [target for _, target in schedule.moves.copies]
    # nothing is copied that nobody else owns
    assert all(manager.blocks[i].ref_count > 0 for i in sources)
    assert all(manager.blocks[i].ref_count > 0 for i in targets)
    assert len(set(targets)) == len(targets)
    assert not sources & set(targets) and not set(schedule.moves.swaps_in.values()) & set(targets)
    for swaps in (schedule.moves.swaps_out, schedule.moves.swaps_in):
        assert len(set(swaps.values())) == len(swaps)
    swapped_in = schedule.moves.swaps_in.values()
    assert all(manager.blocks[i].ref_count > 0 for i in swapped_in)  # none in vain
    assert not any(seq.host_table for request in scheduler.running for seq in request.unfinished)
    for request in scheduler.waiting:  # all or nothing
        assert all(
            seq.block_table == [] and seq.num_computed_tokens == 0 for seq in request.sequences
        )


def play(
    arrivals, block_size, tokens, seqs, spare, caching, num_host_blocks, failures, cls=Scheduler
) -> Counter:
    """Runs a scenario under scarce blocks, host blocks and budgets. The oracle is the fake model,
    asked for one request alone. Counts what has happened."""
    longest = 0  # what the largest request needs when it has the cache for itself
    for _, prompt, max_tokens, _, n, _, _ in arrivals:
        shared = len(prompt) // block_size
        blocks = -(-(min(len(prompt) + max_tokens, MAX_MODEL_LEN) - 1) // block_size)
        longest = max(longest, shared + n * (blocks - shared))
    options = dict(enable_prefix_caching=caching, num_host_blocks=num_host_blocks)
    scheduler = new_scheduler(
        longest + spare, block_size, tokens, seqs, MAX_MODEL_LEN, cls, **options
    )
    manager, runner, events = scheduler.block_manager, FakeRunner(block_size, VOCAB_SIZE), Counter()
    todo, aborts, all_requests, clock = [], [], [], 0
    for i, (wait, prompt, max_tokens, eos, n, is_beams, abort) in enumerate(arrivals):
        request = new_request(i, prompt, max_tokens, n, eos)
        if is_beams:
            request = with_beams(request)
        todo.append((request, wait, abort))
        all_requests.append(request)
    while todo or scheduler.has_unfinished():
        clock += 1
        assert clock < 2000, "no progress"
        while todo and todo[0][1] <= clock:
            request, _, abort = todo.pop(0)
            scheduler.add(request)
            if abort is not None:
                aborts.append((clock + abort, request))
        for when, request in aborts:
            if when == clock:
                scheduler.abort(request)
        schedule = scheduler.schedule()
        check_plan(scheduler, schedule)
        count_events(events, scheduler, schedule)
        if clock in failures:  # before anything was moved or written
            manager = BlockManager(len(manager.blocks), block_size, **options)
            unfinished = scheduler.unfinished()
            scheduler.restart(manager)
            for request in unfinished:
                request.rewind()
                scheduler.enqueue(request)
        else:
            scheduler.update(schedule, *runner.run(schedule))
        check_blocks(
            manager, [seq for request in scheduler.unfinished() for seq in request.unfinished]
        )
    check_blocks(manager, [])
    assert manager.num_used_blocks == 0 and len(manager.free_host_blocks) == num_host_blocks
    for request in all_requests:
        check_results(request)
    return events + Counter(preempted=scheduler.num_preemptions)


def count_events(events: Counter, scheduler: Scheduler, schedule: Schedule) -> None:
    away = [seq for request in scheduler.waiting for seq in request.unfinished if seq.host_table]
    arrived = set(schedule.moves.swaps_in.values())
    back = [
        seq
        for request in scheduler.running
        for seq in request.unfinished
        if arrived & {*seq.block_table}
    ]
    events["copied"] += len(schedule.moves.copies)
    events["swapped out"] += len(schedule.moves.swaps_out)
    events["swapped out samples"] += any(
        len(s.request.sequences) > 1 and not isinstance(s.request, BeamRequest) for s in away
    )
    events["swapped out beams"] += any(isinstance(s.request, BeamRequest) for s in away)
    events["swapped in"] += len(arrived)
    events["swapped in and still shared"] += any(
        scheduler.block_manager.blocks[i].ref_count > 1 for i in arrived
    )
    events["swapped in after what was found"] += any(s.block_table[0] not in arrived for s in back)


scenarios = st.tuples(
    requests,
    st.integers(1, 5),  # block_size
    st.integers(3, 20),  # max_num_batched_tokens
    st.integers(3, 6),  # max_num_seqs
    st.integers(0, 4),  # blocks beyond what the largest request needs
    st.booleans(),  # prefix caching
    st.sampled_from([100, 12, 6, 3, 0]),  # host blocks
    st.sets(st.integers(1, 30), max_size=2),  # steps that fail
)


class AnyPolicy(Scheduler):
    """Decides at random whatever there is to decide."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rng, self.watermark = random.Random(0), 0.2

    def priority(self, request):
        return self.rng.random()

    def next_waiting(self):
        return self.rng.choice([*self.waiting, None])

    def may_admit(self, request, schedule):
        return self.rng.random() < 0.8

    def step_budget(self):
        limit = self.max_num_batched_tokens
        return self.rng.randint(1, limit), self.rng.randint(1, limit)

    def victim(self, candidates):
        return self.rng.choice(candidates)

    def should_swap(self, request):
        return self.rng.random() < 0.5

    def make_room(self, schedule):
        if self.running and self.rng.random() < 0.1:
            self.preempt(self.rng.choice(self.running))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios)
def test_whatever_happens_every_request_gets_its_own_tokens(scenario):
    play(*scenario)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios)
def test_whatever_the_policy_every_request_gets_its_own_tokens(scenario):
    play(*scenario, cls=AnyPolicy)


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
        options = (rng.random() < 0.5, rng.choice([0, 4, 12, 100]), failures)
        sizes = rng.randint(1, 5), rng.randint(3, 20), rng.randint(3, 9), rng.randint(0, 3)
        events += play(arrivals, *sizes, *options)
        play(arrivals, *sizes, *options, cls=AnyPolicy)
    assert min(events.values()) >= total // 10 and len(events) == 8, events
