"""Random loads of a scheduler under scarce blocks, host blocks and budgets, with the fake model as the oracle.

Tests import this file. An example that does: pytest tests/core/test_scheduler.py -k whatever
"""

import random
from collections import Counter

from fake_model import FakeRunner, expected_beams, expected_output
from hypothesis import strategies as st
from scheduling import new_request, new_scheduler

from nanovllm.block_manager import BlockManager
from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request, Sequence
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.decoding.beam_search import BeamRequest, BeamSearch, BeamSearchParams
from nanovllm.topics.swapping.tiers import TwoTiers

VOCAB_SIZE, MAX_MODEL_LEN = 3, 22


arrivals_of_requests = st.lists(
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
        is_swap = type(manager) is BlockManager  # of requests only
        assert not (is_swap and schedule.moves.swaps_out and schedule.moves.swaps_in)
        running = [request.arrival for request in scheduler.running]
        assert running == sorted(running)
    assert all(0 < n <= seq.num_missing_tokens for seq, _, n in schedule.items)
    for request in scheduler.running:
        # all or nothing: sequences of a request have next tokens in the same step
        sampled = {
            seq for seq in schedule.sampled if seq.request is request and type(seq) is Sequence
        }
        assert sampled in (set(), set(request.unfinished))
    sources = {source for source, _ in schedule.moves.copies}
    targets = [target for _, target in schedule.moves.copies]
    # what is copied has owners
    assert all(manager.blocks[i].ref_count > 0 for i in sources)
    assert all(manager.blocks[i].ref_count > 0 for i in targets)
    assert len(set(targets)) == len(targets)
    assert not sources & set(targets) and not set(schedule.moves.swaps_in.values()) & set(targets)
    swapped_in = schedule.moves.swaps_in.values()
    assert len(set(swapped_in)) == len(swapped_in)
    assert all(manager.blocks[i].ref_count > 0 for i in swapped_in)  # none in vain
    assert not any(seq.host_table for request in scheduler.running for seq in request.unfinished)
    for request in scheduler.waiting:  # all or nothing
        assert all(
            seq.block_table == [] and seq.num_computed_tokens == 0 for seq in request.sequences
        )


def play(
    arrivals,
    block_size,
    tokens,
    seqs,
    spare,
    caching,
    num_host_blocks,
    failures,
    keeps_prefixes=False,
    cls=Scheduler,
    proposer=None,
) -> Counter:
    """Runs a scenario under scarce blocks, host blocks and budgets. The oracle is the fake model,
    asked for one request alone. Counts what has happened."""
    longest = 0  # what the largest request needs when it has the cache for itself
    for _, prompt, max_tokens, _, n, _, _ in arrivals:
        shared = len(prompt) // block_size
        blocks = -(-(min(len(prompt) + max_tokens, MAX_MODEL_LEN) - 1) // block_size)
        longest = max(longest, shared + n * (blocks - shared))
    options = dict(enable_prefix_caching=caching, num_host_blocks=num_host_blocks)
    manager_cls = TwoTiers if keeps_prefixes and caching and num_host_blocks else BlockManager
    scheduler = new_scheduler(
        longest + spare, block_size, tokens, seqs, MAX_MODEL_LEN, cls, manager_cls, **options
    )
    scheduler.proposer = proposer
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
            manager = manager_cls(len(manager.blocks), block_size, **options)
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
    check_blocks(manager, [])  # all are free
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
    events["from the host"] += scheduler.num_host_cached_tokens > 0
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
    arrivals_of_requests,
    st.integers(1, 5),  # block_size
    st.integers(3, 20),  # max_num_batched_tokens
    st.integers(3, 6),  # max_num_seqs
    st.integers(0, 4),  # blocks beyond what the largest request needs
    st.booleans(),  # prefix caching
    st.sampled_from([100, 12, 6, 3, 0]),  # host blocks
    st.sets(st.integers(1, 30), max_size=2),  # steps that fail
    st.booleans(),  # whether evicted blocks go to the host
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
