"""Preemption by swap: the moves themselves, and that no request's tokens change.

Run: pytest tests/swapping/test_swap.py [-k same_tokens]
"""

import random

import pytest
import torch
from checkpoints import new_model, save
from scheduling import new_sequence

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.layers.kv_cache import KVCache
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.swapping import host_cache
from nanovllm.topics.swapping.blocks import swap_out
from nanovllm.topics.swapping.host_cache import HostCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENDLESS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(new_model("qwen3"), tmp_path_factory.mktemp("qwen3"))


def new_llm(path, num_blocks=24, mode="swap", **kwargs) -> LLM:
    options = dict(dtype="float32", block_size=4, swap_gib=0.01)
    return LLM(path, num_blocks=num_blocks, preemption_mode=mode, **(options | kwargs))


def prompts(count):
    rng = random.Random(1)
    stem = [rng.randrange(160) for _ in range(9)]
    return [
        stem[: rng.choice([0, 5, 9])] + [rng.randrange(160) for _ in range(rng.randint(1, 14))]
        for _ in range(count)
    ]


def token_ids(outputs):
    return [[output.token_ids for output in result.outputs] for result in outputs]


@pytest.mark.parametrize("blocks_of_a_piece", [1, 3, 64])
def test_blocks_go_out_and_come_back_elsewhere(monkeypatch, blocks_of_a_piece):
    """[2, layers, blocks, block_size, heads, head_dim], 7 blocks out, 5 of them in again."""
    cache = torch.randn(2, 3, 20, 4, 2, 8, device=DEVICE)
    monkeypatch.setattr(host_cache, "PIECE_BYTES", blocks_of_a_piece * cache[:, :, 0].nbytes)
    host, before = HostCache(KVCache(cache), num_blocks=9), cache.clone()
    out = {3: 8, 19: 0, 0: 4, 7: 5, 11: 2, 12: 7, 5: 1}
    host.swap_out(out)
    cache[:, :, list(out)] = torch.nan  # overwritten at once, by the step that needed them
    into = {8: 5, 0: 3, 7: 18, 1: 0, 4: 12}
    host.swap_in(into)
    where = {host_id: block_id for block_id, host_id in out.items()}
    for host_id, block_id in into.items():
        assert torch.equal(cache[:, :, block_id], before[:, :, where[host_id]])
    untouched = [i for i in range(20) if i not in out and i not in into.values()]
    assert torch.equal(cache[:, :, untouched], before[:, :, untouched])


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("tokens", [2048, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_the_same_tokens_with_plenty_of_memory_and_under_both_modes(path, tokens, caching):
    """Greedy, seeded, n > 1 and beams in one batch."""
    all_params = [
        ENDLESS,
        SamplingParams(n=3, seed=5, max_tokens=16),
        BeamSearchParams(beam_width=4, max_tokens=12),
        SamplingParams(seed=8, top_p=0.9, max_tokens=18, ignore_eos=True),
        BeamSearchParams(beam_width=2, max_tokens=10, length_penalty=0.0),
        SamplingParams(n=2, temperature=0, max_tokens=14),
    ] * 2
    options = dict(max_num_batched_tokens=tokens, enable_prefix_caching=caching)
    plenty = new_llm(path, 500, **options)
    expected = token_ids(plenty.generate(prompts(12), all_params, use_tqdm=False))
    assert plenty.stats()["preemptions"] == 0
    for num_blocks, mode, swap_gib in [
        (28, "recompute", 1),
        (28, "swap", 1),
        (40, "swap", 1),
        (28, "swap", 2e-5),
    ]:
        llm = new_llm(path, num_blocks, mode, swap_gib=swap_gib, **options)
        assert token_ids(llm.generate(prompts(12), all_params, use_tqdm=False)) == expected
        stats = llm.stats()
        assert stats["preemptions"] > 0 and (stats["swapped_blocks"] > 0) == (mode == "swap")
        check_blocks(llm.block_manager, [])
        assert (
            stats["kv_blocks_used"] == 0
            and len(llm.block_manager.free_host_blocks) == llm.runner.num_host_blocks
        )


def test_what_was_swapped_is_not_computed_again(path):
    """Without a prefix cache every recomputed token shows: with room in the host there is none, of samples neither."""
    computed = {}
    for name, options in {
        "plenty": dict(num_blocks=500),
        "swap": {},
        "recompute": dict(mode="recompute"),
        "little room": dict(swap_gib=1.5e-5),
    }.items():
        llm = new_llm(path, enable_prefix_caching=False, **options)
        llm.generate(
            prompts(8),
            [ENDLESS, SamplingParams(n=2, max_tokens=9, ignore_eos=True)] * 4,
            use_tqdm=False,
        )
        computed[name] = llm.stats()["computed_tokens"]
    assert computed["plenty"] == computed["swap"] < computed["little room"] < computed["recompute"]


def test_abort_while_swapped_out(path):
    llm = new_llm(path)
    ids = [llm.add_request(prompt, ENDLESS) for prompt in prompts(8)]
    while not any(seq.host_table for request in llm.scheduler.waiting for seq in request.sequences):
        llm.step()
    used = len(llm.block_manager.host_ref_counts) - len(llm.block_manager.free_host_blocks)
    assert used > 0
    assert all(llm.abort(request_id) for request_id in ids if request_id in llm.requests)
    llm.step()
    check_blocks(llm.block_manager, [])
    assert llm.block_manager.num_used_blocks == 0
    assert len(llm.block_manager.free_host_blocks) == llm.runner.num_host_blocks


@pytest.mark.slow
def test_a_step_that_fails_harms_no_request(path, monkeypatch):
    """Whatever it was about to move or write is computed again. Here it fails with blocks to copy, out, and in."""
    expected = token_ids(
        new_llm(path, 500).generate(prompts(8), SamplingParams(n=2, seed=3), use_tqdm=False)
    )
    llm, kinds = new_llm(path, 140, "swap"), set()
    ids = [llm.add_request(prompt, SamplingParams(n=2, seed=3)) for prompt in prompts(8)]
    outputs = {request_id: state.output for request_id, state in llm.states.unfinished.items()}
    run = llm.runner.launch

    def failing(schedule):
        for kind, moves in vars(schedule.moves).items():
            if moves and kind not in kinds:
                kinds.add(kind)
                raise KeyboardInterrupt
        return run(schedule)

    monkeypatch.setattr(llm.runner, "launch", failing)
    while llm.has_unfinished():
        try:
            llm.step()
        except KeyboardInterrupt:
            check_blocks(llm.block_manager, [])  # no sequence has a block
    assert [[o.token_ids for o in outputs[i].outputs] for i in ids] == expected
    assert kinds == {"swaps_in", "swaps_out", "copies"}
    assert llm.stats()["prompt_tokens"] == sum(map(len, prompts(8)))


def test_room_for_no_block_is_refused(path):
    with pytest.raises(
        ValueError,
        match="swap_gib=1e-09 is not allowed: it must be room for a KV block of 2,048 bytes",
    ):
        new_llm(path, swap_gib=1e-9)


def test_more_memory_than_there_is_is_refused(path):
    with pytest.raises(
        ValueError,
        match=r"there is no room for 2147483647 KV blocks \(num_blocks, kv_cache_gib\) and 5242 host",
    ):
        new_llm(path, num_blocks=2**31 - 1)


def test_no_more_room_on_the_host_than_is_of_use(path):
    llm = new_llm(path, swap_gib=100_000, max_num_seqs=3, max_model_len=10)
    assert llm.runner.num_host_blocks == 3 * 3


def test_the_hosts_memory_comes_in_pieces(monkeypatch):
    """PyTorch rounds a pinned tensor up to a power of two: one of 5 GiB would take 8."""
    cache = torch.zeros(2, 3, 9, 4, 2, 8)  # keys and values, layers, blocks, ...
    block_bytes = cache[:, :, 0].nbytes
    monkeypatch.setattr(host_cache, "PIECE_BYTES", 4 * block_bytes)
    host = HostCache(KVCache(cache), 10)
    pieces = [block.untyped_storage().nbytes() // block_bytes for block in host.blocks]
    assert pieces == [4] * 8 + [2] * 2


def test_the_host_may_have_just_enough_room():
    manager = BlockManager(8, 4, num_host_blocks=2)
    seq = new_sequence(range(8))
    manager.allocate(seq, 8)
    seq.num_computed_tokens = 8
    assert swap_out(manager, [seq])
    assert len(seq.host_table) == 2 and not manager.free_host_blocks
