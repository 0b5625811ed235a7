"""A prefix cache that goes on in host memory: what is kept there, what comes back, and that no
token changes.

Run: pytest tests/swapping/test_tiers.py [-k same_tokens]
"""

import random

import pytest
from fake_engine import new_llm as new_fake_llm
from fake_model import FakeRunner
from scheduling import new_sequence

from nanovllm import LLM, BeamSearchParams, Job, SamplingParams, simulate
from nanovllm.block_manager import BlockManager
from nanovllm.config import Config
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.swapping.blocks import bring_back, swap_out
from nanovllm.topics.swapping.tiers import TwoTiers, two_tiers

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SWAP = dict(preemption_mode="swap", swap_prefixes=True)


def new_manager(num_blocks=4, num_host_blocks=4) -> TwoTiers:
    return TwoTiers(num_blocks, block_size=2, num_host_blocks=num_host_blocks)


def admit(manager, token_ids, num_from_host=None):
    """What a step does to a new sequence."""
    seq = new_sequence(token_ids)
    manager.take_prefix(seq)
    assert bring_back(manager, seq) == num_from_host or num_from_host is None
    manager.allocate(seq, seq.num_missing_tokens)
    manager.cache_full_blocks(seq, len(seq))
    return seq


def pass_through(manager, *prompts) -> list:
    """The moves of each step."""
    moves = []
    for token_ids in prompts:
        manager.free(admit(manager, token_ids))
        manager.unwritten.clear()
        moves.append(manager.take_moves())
    return moves


def on_host(manager) -> list:
    """The tokens of the blocks that the host has cached, least recently used first."""
    blocks = [manager.host.blocks[i] for i in manager.host.free_blocks]
    return [block.key[1] for block in blocks if block.key]


def test_an_evicted_prefix_keeps_its_identity():
    """Also if its first block is computed again, beside its copy on the host."""
    manager = new_manager(num_blocks=6, num_host_blocks=8)
    chain = admit(manager, [1, 2, 3, 4, 5, 6])
    prefix_ids = chain.prefix_ids
    manager.free(chain)
    pass_through(manager, [0] * 12)  # evicts all
    assert on_host(manager) == [(5, 6), (3, 4), (1, 2)]
    again = admit(manager, [1, 2])  # its last token, so all of it, is computed
    assert again.prefix_ids == prefix_ids[:1]
    longer = admit(manager, [1, 2, 3, 4, 5, 6, 7], num_from_host=2)
    assert longer.prefix_ids == prefix_ids and longer.block_table[0] == again.block_table[0]
    check_blocks(manager, [again, longer])


def test_what_the_host_has_is_not_copied_again():
    manager = new_manager()
    moves = pass_through(manager, [1, 2, 3, 4], [0] * 8, [1, 2, 3, 4, 5], [9] * 8)
    assert [len(one.swaps_out) for one in moves] == [0, 2, 3, 1]
    assert len(moves[2].swaps_in) == 2 and not moves[3].swaps_in


def test_a_host_block_is_not_refilled_before_it_is_read():
    """The host has two blocks, and both come back in a step that evicts four."""
    manager, memory = new_manager(num_blocks=5, num_host_blocks=2), FakeRunner(2)
    steps = ([1, 2, 3, 4], 0), ([7] * 10, 0), ([1, 2, 3, 4, 5, 6, 7, 8, 9], 2)
    for token_ids, num_from_host in steps:
        seq = admit(manager, token_ids, num_from_host)
        check_blocks(manager, [seq])
        moves = manager.take_moves()
        memory.swap(moves.swaps_out, moves.swaps_in)
        memory.write(seq, seq.num_computed_tokens, seq.num_missing_tokens)
        seq.num_computed_tokens = len(seq)
        memory.check(seq)
        manager.free(seq)
    assert on_host(manager) == [(3, 4), (1, 2)] and not moves.swaps_out
    check_blocks(manager, [])


def test_preempted_requests_push_prefixes_out_and_not_the_other_way_round():
    manager = new_manager(num_blocks=4, num_host_blocks=3)
    pass_through(manager, [1, 2, 3, 4], [5] * 8)
    assert on_host(manager) == [(3, 4), (1, 2)]
    seq = admit(manager, [8, 8, 9, 9])
    seq.num_computed_tokens = 4
    manager.take_moves()
    assert swap_out(manager, [seq])
    manager.free(seq)
    assert len(on_host(manager)) == 1 and len(manager.host.free_blocks) == 1
    pass_through(manager, [6] * 8, [7] * 8)
    check_blocks(manager, [seq])
    assert [manager.host.blocks[i].key[1] for i in seq.host_table] == [(8, 8), (9, 9)]


def test_both_tiers_are_emptied_together():
    llm = new_fake_llm(num_blocks=9, num_host_blocks=30, **SWAP)
    for prompt in ([1] * 30, [2] * 30):
        llm.generate([prompt], GREEDY, use_tqdm=False)
    manager = llm.block_manager
    assert manager.cached_blocks and manager.host.cached_blocks
    llm.reset_prefix_cache()
    assert not manager.cached_blocks and not manager.host.cached_blocks
    check_blocks(manager, [])


def test_a_request_that_scores_its_prompt_finds_nothing():
    llm = new_fake_llm(num_blocks=12, num_host_blocks=30, **SWAP)
    llm.generate([[1] * 30, [2] * 30], GREEDY, use_tqdm=False)
    request = llm.inputs.request([1] * 30, SamplingParams(prompt_logprobs=0, max_tokens=1))
    assert bring_back(llm.block_manager, request.sequences[0]) == 0


class Noting(BlockManager):
    num_evicted = 0

    def take_block(self):
        block_id = next(iter(self.free_blocks))
        self.num_evicted += self.blocks[block_id].key is not None
        return super().take_block()


def test_a_users_block_manager_gets_two_tiers():
    llm = new_fake_llm(num_blocks=9, num_host_blocks=30, block_manager_cls=Noting, **SWAP)
    found = []
    for prompt in ([1] * 30, [2] * 30, [1] * 30):
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        found.append(output.num_cached_tokens)
    stats = llm.stats()
    assert found == [0, 0, 28] and stats["host_cache_hit_tokens"] == 28
    assert stats["prefix_cache_hit_tokens"] == 28
    check_blocks(llm.block_manager, [])
    assert llm.block_manager.num_evicted > 10 and type(llm.block_manager).__name__ == "Noting"
    llm.recovery._start_over()  # as after a fault: nothing is left in either tier
    assert type(llm.block_manager).__name__ == "Noting" and not llm.block_manager.host.cached_blocks


def test_it_is_refused_where_there_are_no_host_blocks():
    class Without(BlockManager):
        def __init__(self, num_blocks, block_size, *_):
            super().__init__(num_blocks, block_size)

    with pytest.raises(
        ValueError, match="swap_prefixes=True .* False without preemption_mode='swap'"
    ):
        Config(swap_prefixes=True)
    with pytest.raises(ValueError, match="swap_prefixes=True is not allowed: Without has no host"):
        two_tiers(Without)(9, 4, True, 30)


def test_the_host_may_have_more_blocks_than_requests_can_fill():
    limits = Config(max_num_seqs=1).resolved(64, 64)
    for keeps, expected in ((False, 4), (True, 1024)):
        config = Config(preemption_mode="swap", swap_prefixes=keeps, swap_gib=1.0)
        assert config.num_host_blocks(2**20, limits) == expected


def test_the_simulator_has_two_tiers():
    jobs = [Job(float(i), ((1 + i % 2, 960),), 8, answer=9) for i in range(6)]
    hits = {}
    for keeps in (False, True):
        options = {"preemption_mode": "swap", "swap_prefixes": keeps}
        run = simulate(jobs, Config(model="qwen3-8b", num_blocks=70, max_model_len=1100, **options))
        hits[keeps] = run.num_cached_tokens, run.num_host_cached_tokens
    # of 59 blocks that could be found, nine are always left on the device
    assert hits == {False: (4 * 9 * 16, 0), True: (4 * 59 * 16, 4 * 50 * 16)}


# --- the same tokens, on a real model ---


def answers(llm, seed=1) -> list:
    """Requests of all kinds, whose prompts begin alike; some come twice."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1500) for _ in range(37)] for _ in range(6)]
    prompts = [rng.choice(stems)[: rng.choice([16, 25, 37])] + [i] * 3 for i in range(40)]
    kinds = [
        GREEDY,
        SamplingParams(n=3, seed=5, max_tokens=9),
        BeamSearchParams(beam_width=3, max_tokens=6),
        SamplingParams(seed=8, top_p=0.9, max_tokens=12, logprobs=1, presence_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1),
    ]
    params = [kinds[i % 5] for i in range(40)]
    found = []
    for begin in range(0, 40, 8):
        some = slice(begin, begin + 8)
        for output in llm.generate(prompts[some], params[some], use_tqdm=False):
            found.append([one.token_ids for one in output.outputs])
    return found


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_tokens_with_and_without(backend, overlap):
    pytest.importorskip(backend)
    options = dict(dtype="float32", block_size=4, attention_backend=backend, overlap=overlap)
    expected = answers(LLM(num_blocks=2000, **options))
    for num_blocks, swap_gib in ((60, 0.01), (60, 0.0005)):
        llm = LLM(num_blocks=num_blocks, swap_gib=swap_gib, **SWAP, **options)
        assert answers(llm) == expected
        stats = llm.stats()
        assert stats["host_cache_hit_tokens"] > 0 < stats["preemptions"]
        check_blocks(llm.block_manager, [])
