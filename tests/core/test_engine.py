"""The engine on random weights: token ids against transformers, and everything a user can do to it.

Run: pytest tests/core/test_engine.py [-k seed]
"""

import random
import sys
from dataclasses import replace

import pytest
import torch
from checkpoints import greedy, new_model, save
from fake_engine import go_on

from nanovllm import LLM, SamplingParams
from nanovllm.device.memory import largest_step
from nanovllm.engine import SEED_STEP
from nanovllm.topics.checks.blocks import check_blocks

BLOCK, MAX_TOKENS = 4, 12


def new_engine(checkpoints, **options) -> LLM:
    defaults = {"dtype": "float32", "block_size": BLOCK, "num_blocks": 200}
    return LLM(checkpoints["qwen3"][0], **defaults | options)


def greedy_params(max_tokens=MAX_TOKENS, **kwargs) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **kwargs)


def token_ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """family -> (path, prompts, what transformers makes of them)."""
    rng, made = random.Random(0), {}
    for family in ("qwen2", "qwen3", "llama"):
        model = new_model(family)
        lengths = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33]
        prompts = [[rng.randrange(160) for _ in range(length)] for length in lengths]
        stem = [rng.randrange(160) for _ in range(4 * BLOCK)]
        # prefixes around borders
        for shared in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 4 * BLOCK - 1, 4 * BLOCK):
            prompts += [
                stem[:shared],
                stem[:shared] + [rng.randrange(160) for _ in range(rng.choice([1, 3, 4, 5]))],
            ]
        path = save(model, tmp_path_factory.mktemp(family))
        made[family] = path, prompts, [greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    return made


@pytest.fixture(scope="module")
def llm(checkpoints):
    return new_engine(checkpoints)


@pytest.fixture(autouse=True)
def no_block_is_lost(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        llm.step()  # what was aborted ends now
        check_blocks(llm.block_manager, [])
        assert not llm.has_unfinished() and llm.block_manager.num_used_blocks == 0
        assert not llm.scheduler.has_unfinished() and not llm.recovery.is_changing
        assert not llm.recovery.suspects


# --- parity ---


@pytest.mark.slow(but_every=7)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tokens", [37, 2048])
@pytest.mark.parametrize("num_blocks", [13, 500])
@pytest.mark.parametrize("caching", [True, False])
def test_greedy_tokens_equal_transformers(checkpoints, family, tokens, num_blocks, caching):
    path, prompts, expected = checkpoints[family]
    engine = LLM(
        path,
        dtype="float32",
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_num_batched_tokens=tokens,
        enable_prefix_caching=caching,
    )
    for _ in range(2):  # the second time most prompts are in the cache, some of them wholly
        assert token_ids(engine.generate(prompts, greedy_params(), use_tqdm=False)) == expected
    stats = engine.stats()
    assert (stats["preemptions"] >= 5) == (num_blocks == 13)
    assert (stats["prefix_cache_hit_tokens"] > 0) == caching
    check_blocks(engine.block_manager, [])
    assert stats["kv_blocks_used"] == 0 and stats["kv_blocks_used_peak"] <= num_blocks


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_size_does_not_matter(checkpoints, block_size):
    _, prompts, expected = checkpoints["qwen3"]
    options = {"kv_cache_gib": 0.01, "max_num_batched_tokens": 50}
    engine = new_engine(checkpoints, block_size=block_size, num_blocks=None, **options)
    assert token_ids(engine.generate(prompts, greedy_params(), use_tqdm=False)) == expected


# --- sampling ---


def test_a_seed_gives_the_same_tokens_in_any_company(llm, checkpoints):
    prompts = checkpoints["qwen3"][1][:8]
    params = [SamplingParams(seed=i, max_tokens=10, top_k=20, top_p=0.9) for i in range(8)]
    together = token_ids(llm.generate(prompts, params, use_tqdm=False))
    assert [
        token_ids(llm.generate(p, q, use_tqdm=False))[0] for p, q in zip(prompts, params)
    ] == together
    tight = new_engine(checkpoints, block_size=2, num_blocks=22, max_num_batched_tokens=5)
    assert token_ids(tight.generate(prompts, params, use_tqdm=False)) == together
    assert tight.stats()["preemptions"] > 0
    other = token_ids(
        llm.generate(prompts, [SamplingParams(seed=99, max_tokens=10)] * 8, use_tqdm=False)
    )
    assert other != together


def test_without_a_seed_requests_differ_but_engines_agree(checkpoints):
    engines = [new_engine(checkpoints, seed=seed) for seed in (0, 0, 1)]
    params = SamplingParams(max_tokens=20)
    runs = [token_ids(e.generate([[1, 2, 3]] * 3, params, use_tqdm=False)) for e in engines]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1] != runs[0][2]


def test_samples_differ_and_do_not_depend_on_how_many_there_are(llm):
    five, two = (
        llm.generate([[1, 2, 3]], SamplingParams(n=n, seed=5, max_tokens=8), use_tqdm=False)[0]
        for n in (5, 2)
    )
    assert [o.token_ids for o in five.outputs[:2]] == [o.token_ids for o in two.outputs]
    assert [o.index for o in five.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(o.token_ids) for o in five.outputs}) == 5


def test_logprobs_are_those_of_the_model(llm, checkpoints):
    path, prompts, _ = checkpoints["qwen3"]
    prompt = prompts[5]
    (output,) = llm.generate([prompt], greedy_params(4, logprobs=3), use_tqdm=False)
    completion = output.outputs[0]
    with torch.inference_mode():
        logits = new_model("qwen3")(torch.tensor([prompt + completion.token_ids])).logits
        logits = logits[0, len(prompt) - 1 : -1]
    for token, found, row in zip(completion.token_ids, completion.logprobs, logits.log_softmax(-1)):
        values, ids = row.topk(3)
        assert list(found) == ids.tolist() and token == ids[0]
        torch.testing.assert_close(torch.tensor(list(found.values())), values, atol=1e-4, rtol=1e-4)


# --- the loop ---


def test_requests_may_come_and_go_at_any_step(llm, checkpoints):
    _, prompts, expected = checkpoints["qwen3"]
    rng, todo, aborted, done = random.Random(1), dict(enumerate(prompts)), set(), {}
    while todo or llm.has_unfinished():
        for i in rng.sample(sorted(todo), min(len(todo), rng.randrange(3))):
            assert llm.add_request(todo.pop(i), greedy_params(), request_id=f"r{i}") == f"r{i}"
        for output in llm.step():
            if output.finished:
                done[int(output.request_id[1:])] = output
        if llm.requests and rng.random() < 0.2:  # the next step() reports it
            victim = rng.choice(sorted(llm.requests))
            assert llm.abort(victim) and not llm.abort(f"{victim}?")
            aborted.add(int(victim[1:]))
    assert aborted and done.keys() | aborted == set(range(len(prompts)))
    for i, output in done.items():
        result = output.outputs[0]
        assert result.finish_reason == ("abort" if i in aborted else "length")
        length = len(result.token_ids) if i in aborted else MAX_TOKENS
        assert result.token_ids == expected[i][:length]


def test_generate_beside_requests_of_the_loop(llm, checkpoints):
    _, prompts, expected = checkpoints["qwen3"]
    mine = llm.add_request(prompts[0], greedy_params(30))
    (output,) = llm.generate([prompts[1]], greedy_params(), use_tqdm=False)
    assert output.outputs[0].token_ids == expected[1]
    (mine_so_far,) = llm.step()  # only the loop's own request is reported to the loop
    assert mine_so_far.request_id == mine
    assert len(mine_so_far.outputs[0].token_ids) == MAX_TOKENS + 1
    go_on(llm)
    assert mine_so_far.finished and mine_so_far.outputs[0].token_ids[:MAX_TOKENS] == expected[0]


def test_nan_in_the_cache_of_one_request_does_not_reach_another(llm, checkpoints):
    _, prompts, expected = checkpoints["qwen3"]
    sick = llm.add_request([1] * 60, greedy_params(4))
    short = llm.add_request(prompts[6], greedy_params())
    llm.step()
    llm.runner.kv_cache.tensor[:, :, llm.requests[sick].sequences[0].block_table] = torch.nan
    assert go_on(llm)[short].outputs[0].token_ids == expected[6]
    llm.runner.kv_cache.tensor.zero_()  # nor any later test of this module
    llm.block_manager.cached_blocks.clear()
    for block in llm.block_manager.blocks:
        block.key = block.prefix_id = None


def test_generate_takes_one_prompt_or_many(llm, checkpoints, capfd):
    _, prompts, expected = checkpoints["qwen3"]
    assert token_ids(llm.generate(prompts[4], greedy_params(), use_tqdm=False)) == [expected[4]]
    assert llm.generate([], greedy_params(), use_tqdm=False) == []
    all_params = [greedy_params(length) for length in (3, 1, 2)]
    outputs = llm.generate(prompts[:3], all_params, use_tqdm=False)
    assert [len(ids) for ids in token_ids(outputs)] == [3, 1, 2]  # in the order of the prompts
    assert not capfd.readouterr().err  # there was no bar
    with pytest.raises(ValueError, match="is empty"):
        llm.generate([[1], []], use_tqdm=False)
    assert not llm.has_unfinished()


# --- bad input: a clear error, and the engine goes on; each kind of it is in test_inputs.py ---


@pytest.mark.parametrize(
    "prompts, params, message",
    [
        ([[]], None, r"prompt=\[\] is empty"),
        ([[1], [2] * 300], None, "the prompt has 300 tokens, but max_model_len=256"),
        (["text"], None, "prompt='text' is not allowed: model=.* has no tokenizer"),
        ([[{"role": "user", "content": "hi"}]], None, "has no tokenizer"),
        ([[1]], SamplingParams(stop="x"), "stop=.* is not allowed: model=.* has no tokenizer"),
        ([[1], [2]], [SamplingParams()] * 3, "2 prompts, but 3 sampling params"),
        ([[1]], [SamplingParams(), None], "1 prompts, but 2 sampling params"),
    ],
)
def test_bad_requests(llm, prompts, params, message):
    running = llm.add_request([1, 2, 3], greedy_params(3))
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    # nothing of a refused call was added, and the other request goes on
    assert list(llm.requests) == [running]
    output = go_on(llm)[running]
    assert output.finished and len(output.outputs[0].token_ids) == 3


def test_a_request_id_twice(llm):
    llm.add_request([1], greedy_params(2), request_id="a")
    with pytest.raises(
        ValueError, match="request_id='a' is not allowed: a request with this id is still in use"
    ):
        llm.add_request([2], greedy_params(2), request_id="a")
    go_on(llm)
    assert llm.abort("a") is False


def test_ids_and_times(llm, monkeypatch):
    """A number that a user has chosen as an id is left out. An id is free once its output was given to the caller."""
    monkeypatch.setattr(llm.scheduler, "clock", lambda: 7.5)
    first = llm.add_request([1], greedy_params(2))
    assert not llm.scheduler.waiting  # the next step queues it
    assert llm.requests[first].arrival_time == 7.5
    with pytest.raises(ValueError, match="still in use"):
        llm.add_request([2], request_id=first)
    ids = [f"{int(first) + 3}", f"{int(first) + 4}"]
    for i, name in enumerate(ids, 1):  # the numbers behind the next ones
        llm.add_request([2], SamplingParams(max_tokens=1), request_id=name)
        mine = llm.requests[name]
        assert mine.arrival == int(first) + i
        assert mine.seed == (llm.config.seed + mine.arrival * SEED_STEP) % 2**63
    assert llm.add_request([3], greedy_params(2)) == f"{int(first) + 5}"
    monkeypatch.setattr(llm.scheduler, "max_num_seqs", 3)
    assert len(llm.step()) == 3  # the fourth has no token yet
    llm.generate([[4]], greedy_params(9), use_tqdm=False)  # meanwhile, the others end
    with pytest.raises(ValueError, match="still in use"):
        llm.add_request([5], greedy_params(2), request_id=first)
    go_on(llm)
    llm.add_request([5], greedy_params(2), request_id=first)
    go_on(llm)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"max_model_len": 257}, "max_model_len=257 is not allowed: it must be at most 256"),
        ({"max_model_length": 5}, "did you mean 'max_model_len'"),
        ({"device": "cuda:99"}, "device='cuda:99' is not allowed: PyTorch finds . CUDA devices"),
        ({"kv_cache_gib": 1e-9}, "no memory is left for a KV block"),
    ],
)
def test_bad_engines(checkpoints, kwargs, message):
    with pytest.raises(ValueError, match=message):
        LLM(checkpoints["qwen3"][0], **kwargs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is allowed")
def test_triton_without_a_gpu_and_without_the_interpreter(checkpoints, monkeypatch):
    module = "nanovllm.backends.triton_ops"
    pytest.importorskip(module)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.delitem(sys.modules, module)  # it is imported again
    monkeypatch.delattr(module)
    message = "attention_backend='triton' is not allowed: triton needs a GPU .* TRITON_INTERPRET=1"
    with pytest.raises(ValueError, match=message):
        LLM(checkpoints["qwen3"][0], attention_backend="triton")


def test_a_directory_that_is_no_model(tmp_path):
    with pytest.raises(ValueError, match="is not a model directory: it has no config.json"):
        LLM(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(ValueError, match=r"config.json.* cannot be read"):
        LLM(tmp_path)
    with pytest.raises(
        ValueError, match="is not a local directory, and it could not be downloaded from the hub"
    ):
        LLM("nobody/has-this-model")


def test_the_profiling_step_of_the_gpu_path(llm):
    """It runs on CUDA to size the cache; here it only has to be a valid step of every shape."""
    cache = llm.runner.kv_cache
    try:
        llm.runner.kv_cache = llm.runner.shape.new_cache(1, llm.runner.device)
        for tokens, seqs in ((16, 4), (5, 256), (700, 2)):
            llm.runner.limits = replace(
                llm.limits, max_num_batched_tokens=tokens, max_num_seqs=seqs
            )
            step = largest_step(llm.runner.limits, llm.runner.shape.block_size)
            assert all(
                seq.request.rules.words and seq.request.rules.has_penalty for seq in step.sampled
            )
            llm.runner.launch(step)()
    finally:
        llm.runner.kv_cache, llm.runner.limits = cache, llm.limits


# --- as many as fit, which is first, and an empty cache ---


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_blocks", [5, 8, 11, 64])
def test_as_many_tokens_as_fit(checkpoints, n, num_blocks):
    """Into max_model_len, and into the cache."""
    llm = new_engine(checkpoints, num_blocks=num_blocks, max_model_len=50)
    params = SamplingParams(n=n, seed=1, max_tokens=None)
    (output,) = llm.generate([[5] * 6], params, use_tqdm=False)
    lengths = {len(answer.token_ids) for answer in output.outputs}
    (length,) = lengths
    room = (
        (num_blocks - 1) // n if n > 1 else num_blocks - 1
    )  # blocks, beside the prompt's full one
    most = min(44, (1 + room) * BLOCK + 1 - 6)
    assert most - BLOCK < length <= most and (length == 44 or num_blocks < 64)
    check_blocks(llm.block_manager, [])
    with pytest.raises(
        ValueError, match="may need .* max_tokens=None, n=" if num_blocks == 5 else "at most 49"
    ):
        llm.generate([[5] * (30 if num_blocks == 5 else 50)], params, use_tqdm=False)


def test_the_smallest_priority_is_served_first(checkpoints):
    prompts = checkpoints["qwen3"][1]
    llm = new_engine(checkpoints, max_num_seqs=1)
    for priorities in ([0, 0, 0], [2, 1, 0], [5, -5, 5]):
        ids = [
            llm.add_request(prompt, greedy_params(3), priority=priority)
            for prompt, priority in zip(prompts, priorities)
        ]
        ended = []
        while llm.has_unfinished():
            ended += [output.request_id for output in llm.step() if output.finished]
        assert ended == sorted(ids, key=lambda name: (priorities[ids.index(name)], int(name)))
    both = llm.generate(prompts[:2], greedy_params(3), use_tqdm=False, priority=[1, 0])
    assert [output.prompt_token_ids for output in both] == prompts[:2]
    with pytest.raises(
        ValueError, match="2 prompts, but 1 priorities: give a list with one for each"
    ):
        llm.generate(prompts[:2], greedy_params(3), use_tqdm=False, priority=[1])


def test_the_prefix_cache_can_be_emptied(checkpoints):
    """Also while others run; then nothing of it is found, and they are not disturbed."""
    _, prompts, expected = checkpoints["qwen3"]
    llm = new_engine(checkpoints)
    prompt = prompts[-1]

    def hits() -> int:
        (output,) = llm.generate([prompt], greedy_params(), use_tqdm=False)
        assert output.outputs[0].token_ids == expected[-1]
        return output.num_cached_tokens

    assert hits() == 0 and hits() >= BLOCK
    assert llm.reset_prefix_cache()
    assert hits() == 0
    request_id = llm.add_request(prompt, greedy_params())
    for _ in range(4):
        llm.step()
    request = llm.requests[request_id]
    assert llm.reset_prefix_cache() and not llm.block_manager.cached_blocks
    check_blocks(llm.block_manager, request.sequences)
    assert hits() == 0
    go_on(llm)
    assert request.sequences[0].output_token_ids == expected[-1]
    check_blocks(llm.block_manager, [])


def test_requests_share_with_those_of_the_same_salt_only(checkpoints):
    _, prompts, expected = checkpoints["qwen3"]
    llm = new_engine(checkpoints)

    def hits(salt: str | None) -> int:
        params = greedy_params(cache_salt=salt)
        (output,) = llm.generate([prompts[-1]], params, use_tqdm=False)
        assert output.outputs[0].token_ids == expected[-1]
        return output.num_cached_tokens

    salts = [None, "0", "a"]  # the first is no number
    assert [*map(hits, salts)] == [0, 0, 0]
    assert all(hits(salt) >= BLOCK for salt in salts)
