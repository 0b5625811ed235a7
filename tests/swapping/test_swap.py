"""Preemption by swap: the moves themselves, and that no request's tokens change.

Run: pytest tests/swapping/test_swap.py [-k same_tokens]
"""

import random

import pytest
import torch
from checkpoints import new_model, save

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.layers.kv_cache import KVCache
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.swapping import host_cache
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
        check_blocks(llm.block_manager, [])  # all are free


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
