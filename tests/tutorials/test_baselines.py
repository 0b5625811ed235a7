"""The systems that the paper compares with: right answers from them, too, only with more memory and more steps.

Run: pytest tests/tutorials/test_baselines.py [-k buddy]
"""

import random

import pytest
from checkpoints import new_model, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.processing.stats import slot_usage
from nanovllm.sequence import Request
from nanovllm.topics.checks.blocks import check_blocks
from tutorials.baselines import replay
from tutorials.baselines.contiguous import ContiguousBlockManager, OrcaMax, OrcaOracle, OrcaPow2
from tutorials.baselines.static_batching import StaticBatching


def new_request(prompt=3, max_tokens=4, n=1) -> Request:
    return Request("r", None, [0] * prompt, SamplingParams(max_tokens=max_tokens, n=n))


class Small(OrcaMax):
    max_model_len = 64


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(new_model("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.mark.slow(but_every=3)
@pytest.mark.parametrize("manager", [Small, OrcaPow2, OrcaOracle, None])
@pytest.mark.parametrize("scheduler", [StaticBatching, None])
@pytest.mark.parametrize("block_size", [1, 4])
def test_the_same_tokens(path, manager, scheduler, block_size):
    rng = random.Random(2)
    prompts = [[rng.randrange(160) for _ in range(rng.randint(1, 20))] for _ in range(12)]
    params = [
        SamplingParams(seed=i, n=1 + (i % 4 == 1), max_tokens=rng.randint(1, 20)) for i in range(12)
    ]
    expected = LLM(path, dtype="float32", num_blocks=500).generate(prompts, params, use_tqdm=False)
    llm = LLM(
        path, dtype="float32", block_size=block_size, num_blocks=160 // block_size, max_num_seqs=6, max_model_len=64,
        block_manager_cls=manager, scheduler_cls=scheduler, max_num_batched_tokens=70,
    )  # fmt: skip
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [[o.token_ids for o in r.outputs] for r in outputs] == [
        [o.token_ids for o in r.outputs] for r in expected
    ]
    stats = llm.stats()
    assert stats["kv_blocks_used"] == 0 and (manager is None or stats["preemptions"] == 0)
    check_blocks(llm.block_manager, [])


def test_what_is_reserved():
    """Prompt of 3, 25 to come: all there is, 3 + 32, 3 + 25; and the next power of two, because of the buddies."""
    request = new_request(prompt=3, max_tokens=25)
    for cls, tokens, reserved in [(Small, 64, 64), (OrcaPow2, 35, 64), (OrcaOracle, 28, 32)]:
        manager = cls(num_blocks=200, block_size=1)
        assert manager.tokens_to_reserve(request) == tokens
        assert manager.max_blocks_needed(request) == reserved
        (seq,) = request.sequences
        manager.allocate(seq, 3)
        seq.num_computed_tokens = 3
        used = slot_usage(manager, [(seq, 27)])
        assert used == {
            "token_states": 3, "reserved": 24, "internal_fragmentation": reserved - 27, "external_fragmentation": 0,
            "free": 200 - reserved, "shared": 0,
        }  # fmt: skip
        manager.free(seq)


def test_external_fragmentation():
    """Four blocks are free and four are needed, but no four are neighbors."""
    manager = OrcaOracle(num_blocks=8, block_size=1)
    small = [new_request(prompt=1, max_tokens=1).sequences[0] for _ in range(4)]
    for seq in small:
        manager.allocate(seq, 1)
    manager.free(small[0])
    manager.free(small[2])
    two, four = (new_request(prompt=n, max_tokens=n) for n in (1, 2))
    assert manager.num_free_blocks == 4 and not manager.can_admit(four)
    assert manager.can_admit(two)
    manager.free(small[1])
    assert manager.can_admit(four)


def test_beams_and_what_is_too_long_are_refused(path):
    llm = LLM(path, dtype="float32", num_blocks=40, block_size=4, block_manager_cls=Small)
    with pytest.raises(ValueError, match="beam search is not possible with Small"):
        llm.beam_search([[1, 2]], BeamSearchParams(beam_width=2))
    with pytest.raises(ValueError, match=r"may cache 79 tokens, but Small.max_model_len=64"):
        llm.generate([[1] * 60], SamplingParams(max_tokens=20))
    with pytest.raises(ValueError, match="may need 48 KV blocks"):
        llm.generate([[1, 2]], SamplingParams(n=3, max_tokens=20))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.randoms()), max_size=40),
)
def test_the_buddy_allocator(num_blocks, events):
    """Runs are aligned, disjoint and as many as there can be; when all are back, so are the largest."""

    class Exact(ContiguousBlockManager):
        def tokens_to_reserve(self, request):
            return len(request.prompt_token_ids)

    manager, running = Exact(num_blocks, 1), []
    before = [set(runs) for runs in manager.free_runs]
    for size, is_free, rng in events:
        if is_free and running:
            manager.free(running.pop(rng.randrange(len(running))))
        (seq,) = new_request(prompt=size).sequences
        run = 2 ** (size - 1).bit_length()
        used = {block_id for other in running for block_id in other.block_table}
        places = [
            start
            for start in range(0, num_blocks - run + 1, run)
            if not used & {*range(start, start + run)}
        ]
        assert manager.can_admit(seq.request) == bool(places)
        if places:
            manager.allocate(seq, 1)
            start = seq.block_table[0]
            assert start in places and seq.block_table == [*range(start, start + run)]
            running.append(seq)
        check_blocks(manager, running)
    for seq in running:
        manager.free(seq)
    assert manager.free_runs == before


def test_a_static_batch_waits_for_its_longest(path):
    steps = {}
    for cls in (StaticBatching, None):
        llm = LLM(path, dtype="float32", num_blocks=100, max_num_seqs=4, scheduler_cls=cls)
        lengths = (2, 3, 30, 4, 5, 30, 2, 2)
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        llm.generate([[i] for i in range(8)], params, use_tqdm=False)
        steps[cls] = llm.stats()["steps"]
    assert steps == {StaticBatching: 60, None: 33}


def test_a_static_batch_has_as_many_as_there_are_seats(path):
    """Also if its prompts take several steps: 40 tokens each, 50 in a step."""
    options = {"num_blocks": 100, "max_num_seqs": 4, "max_num_batched_tokens": 50}
    llm = LLM(path, dtype="float32", scheduler_cls=StaticBatching, **options)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    for i in range(6):
        llm.add_request([i] * 40, params, str(i))
    sizes, done = [], []
    while llm.has_unfinished():
        done += [output.request_id for output in llm.step() if output.finished]
        sizes.append(len(llm.scheduler.running))
    assert max(sizes) == 4 and done == ["0", "1", "2", "3", "4", "5"]
    # the last two wait until the four are done
    assert sizes.index(2, sizes.index(4)) > sizes.index(4)
    late = sizes[sizes.index(0) :]
    assert max(late) == 2


def test_replay_counts_every_slot_once():
    used = {}
    for name, manager_cls in replay.SYSTEMS.items():
        lengths = replay.lognormal_lengths("ShareGPT", 150)
        used[name] = replay.replay(lengths, manager_cls, 16, replay.Setting(), every=25)
        parts = ("token_states", "reserved", "internal_fragmentation", "external_fragmentation")
        assert sum(used[name][part] for part in parts) == pytest.approx(1)
        assert used[name]["shared"] == 0
    running = [round(numbers["running"]) for numbers in used.values()]
    assert running == sorted(running)
    assert used["Orca (Max)"]["running"] == 7  # pieces of 2,048 in 15,700 slots
    # waste below 4 %
    assert used["Orca (Oracle)"]["token_states"] < 0.5 and used["paged"]["token_states"] > 0.96
