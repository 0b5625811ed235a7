"""Small parts of the engine that no other test would miss if they were taken out.

Run: pytest tests/core/test_mutants.py [-k swapped]
"""

import pytest
from fake_model import FakeRunner, expected_output
from test_block_manager import new_sequence
from test_faults import new_llm
from test_scheduler import drain, new_request, new_scheduler, step

from nanovllm import SamplingParams
from nanovllm.block_manager import BlockManager


def check_tokens(request, vocab_size=50) -> None:
    for seq in request.sequences:
        assert seq.output_token_ids == expected_output(request, seq.index, 64, vocab_size)


def test_blocks_that_one_has_to_spare_are_no_use_to_another():
    """num_new_blocks: a chunk of a prompt that has all its blocks lacks none, and not less than none."""
    manager = BlockManager(num_blocks=8, block_size=4)
    chunked, decoding = new_sequence(range(16)), new_sequence(range(50, 54))
    manager.allocate(chunked, 16)
    manager.allocate(decoding, 4)
    decoding.num_computed_tokens = 4
    decoding.token_ids.append(1)
    assert manager.num_new_blocks([(chunked, 0, 3), (decoding, 4, 1)]) == 1


@pytest.mark.parametrize("admitted_first", [True, False])
def test_blocks_of_samples_that_have_not_forked_are_reserved(admitted_first):
    """3 x 23 tokens, 8 of them shared. When the first has its 2 blocks, 12 of 14 are free, and the others will need 8."""
    scheduler, runner = (
        new_scheduler(
            num_blocks=40, tokens=7 if admitted_first else 10, enable_prefix_caching=False
        ),
        FakeRunner(4, vocab_size=50),
    )
    samples, filler = new_request(0, 8, max_tokens=20, n=3), new_request(1, [9] * 20, max_tokens=1)
    scheduler.add(samples)
    while samples.sequences[0].num_output_tokens < 15:
        step(scheduler, runner)
    scheduler.preempt(scheduler.running[-1])
    scheduler.add(filler)
    manager = scheduler.block_manager
    hidden, manager.free_blocks = manager.free_blocks, type(manager.free_blocks).fromkeys(range(14))
    while not samples.has_forked:
        plan = step(scheduler, runner)
    assert plan == [("0", 1 if admitted_first else 8)] and scheduler.waiting == [filler]
    manager.free_blocks.update((i, None) for i in hidden if i >= 14)
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
    manager.findable.clear()
    for block in manager.blocks:
        block.key = block.prefix_id = None
    needed = list(first.host_table)
    schedule = scheduler.schedule()
    assert second.num_computed_tokens == request.num_shared_tokens == 7
    assert list(schedule.moves.swaps_in) == needed
    scheduler.update(schedule, *runner.run(schedule))
    drain(scheduler, runner)
    check_tokens(request)


@pytest.mark.parametrize("lengths", [(1, 0, 0), (1, 1, 0), (3, 3, 2), (3, 2, 2)])
def test_only_some_samples_had_their_token(lengths):
    """An update was interrupted, and all of the tokens are right."""
    scheduler, runner = new_scheduler(num_blocks=40, tokens=64), FakeRunner(4, vocab_size=1)
    request = new_request(1, 8, max_tokens=6, n=3)
    scheduler.add(request)
    for seq, length in zip(request.sequences, lengths):
        seq.token_ids += expected_output(request, seq.index, 64, 1)[:length]
    request.rewind()
    scheduler.restart(BlockManager(40, 4))
    scheduler.enqueue(request)
    for _ in range(10):
        if scheduler.has_unfinished():
            step(scheduler, runner)
    assert not scheduler.has_unfinished()
    check_tokens(request, 1)


def test_ctrl_c_between_a_log_probability_and_its_token():
    class Tokens(list):
        def append(self, token_id):
            seq.token_ids = list(self)
            raise KeyboardInterrupt

    params = SamplingParams(seed=1, max_tokens=5, logprobs=2)
    (expected,) = new_llm().generate([[5] * 9], params, use_tqdm=False)
    llm = new_llm()
    llm.add_request([5] * 9, params, "a")
    llm.step()
    (seq,) = llm.requests["a"].sequences
    seq.token_ids = Tokens(seq.token_ids)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    while llm.has_unfinished():
        (output,) = llm.step()
    assert (
        output.outputs[0].logprobs == expected.outputs[0].logprobs
        and len(expected.outputs[0].logprobs) == 5
    )


def test_a_prefix_that_others_use_needs_no_free_blocks():
    """24 tokens that somebody holds and 4 others: two free blocks are enough."""
    scheduler, runner = new_scheduler(num_blocks=9, tokens=64), FakeRunner(4, vocab_size=50)
    scheduler.add(new_request(0, 25, max_tokens=3))
    step(scheduler, runner)
    assert scheduler.block_manager.num_free_blocks == 2
    scheduler.add(new_request(1, [*range(24), 60, 61, 62, 63], max_tokens=1))
    assert step(scheduler, runner) == [("0", 1), ("1", 4)]


def test_who_comes_while_suspects_run_apart_waits(monkeypatch):
    llm, steps = new_llm(), []
    real = llm.runner.launch

    def run(schedule):
        names = {seq.request.request_id for seq, _, _ in schedule.items}
        steps.append((bool(llm.recovery.suspects), names))
        if "bad" in names:
            raise MemoryError
        return real(schedule)

    monkeypatch.setattr(llm.runner, "launch", run)
    for i, name in enumerate(["good", "bad", "better"]):
        llm.add_request([i + 1] * 9, SamplingParams(seed=i, max_tokens=4), name)
    llm.step()
    llm.add_request([8] * 9, SamplingParams(seed=8, max_tokens=4), "new")
    while llm.has_unfinished():
        llm.step()
    assert not any("new" in names for is_apart, names in steps if is_apart) and any(
        "new" in names for _, names in steps
    )
