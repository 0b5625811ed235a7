"""On a real GPU: Triton kernels and CUDA graphs through the whole engine. Skipped where there is none.

With --gpu, test_ops.py, test_kernels.py, test_cuda_graphs.py and test_sampler.py run on the GPU, too.

Run: pytest --gpu tests/device/test_gpu.py [-k replayed]
"""

import gc
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton
from checkpoints import greedy, new_model, save

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.backends import triton_ops
from nanovllm.topics.checks.blocks import check_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and --gpu"),
]
MAX_TOKENS = 12
# first steps with so few prompts that a recording has room for them
RECORDED = {"dtype": "float32", "num_blocks": 500, "max_num_seqs": 24, "max_num_batched_tokens": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


def prompts_of_all_lengths() -> list[list[int]]:
    """Around the ends of blocks; some begin with the same tokens."""
    rng = random.Random(0)
    stem = [rng.randrange(160) for _ in range(64)]
    prompts = [
        [rng.randrange(160) for _ in range(n)] for n in (1, 2, 7, 15, 16, 17, 31, 33, 65, 130)
    ]
    prompts += [[*stem[:n], rng.randrange(160)] for n in (15, 16, 17, 48, 63)]
    return [*prompts, stem]


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "qwen3_moe"])
def checkpoint(request, tmp_path_factory):
    """(path, prompts, what transformers makes of them on the CPU in fp32)"""
    sizes = dict(head_dim=32, num_attention_heads=6, num_key_value_heads=2)
    if request.param == "qwen3_moe":
        sizes |= {"num_experts": 4, "decoder_sparse_step": 2}  # one layer of each kind
    model = new_model(request.param, **sizes)
    prompts = prompts_of_all_lengths()
    path = save(model, tmp_path_factory.mktemp(request.param))
    return path, prompts, [greedy(model, prompt, MAX_TOKENS) for prompt in prompts]


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("tokens, num_blocks", [(2048, 500), (37, 500), (2048, 14), (37, 14)])
@pytest.mark.parametrize("caching", [True, False])
def test_greedy_tokens_equal_transformers(checkpoint, eager, tokens, num_blocks, caching):
    path, prompts, expected = checkpoint
    llm = LLM(
        path, dtype="float32", attention_backend="triton", enforce_eager=eager, max_num_batched_tokens=tokens,
        num_blocks=num_blocks, enable_prefix_caching=caching, max_num_seqs=24,
    )  # fmt: skip
    for _ in range(2):
        assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
    assert (llm.stats()["preemptions"] > 0) == (num_blocks == 14)
    check_blocks(llm.block_manager, [])


@pytest.mark.parametrize("eager", [True, False])
def test_swapped_samples_and_beams_get_the_same_tokens(checkpoint, eager):
    """Through pinned memory and a second stream, with sharing. A race would show as other tokens."""
    path, prompts, _ = checkpoint
    kinds = [
        GREEDY,
        SamplingParams(n=3, seed=5, max_tokens=20),
        BeamSearchParams(beam_width=3, max_tokens=12),
    ]
    params = (kinds * len(prompts))[: len(prompts)]
    results = []
    for num_blocks in (500, 32):
        llm = LLM(
            path, dtype="float32", attention_backend="triton", enforce_eager=eager, num_blocks=num_blocks,
            preemption_mode="swap", swap_gib=0.1, max_num_seqs=24,
        )  # fmt: skip
        for _ in range(3):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([[output.token_ids for output in result.outputs] for result in outputs])
        assert (llm.stats()["swapped_blocks"] > 0) == (num_blocks == 32)
        check_blocks(llm.block_manager, [])
    assert all(result == results[0] for result in results)


def test_graphs_are_replayed(checkpoint):
    path, prompts, expected = checkpoint
    llm = LLM(path, **RECORDED)
    replayed = []
    for size, step in llm.runner.recorder.replays.items():
        llm.runner.recorder.replays[size] = lambda size=size, step=step: (
            replayed.append(size) or step()
        )
    assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
    assert llm.runner.ops is triton_ops and len(replayed) >= MAX_TOKENS - 1
    assert 16 in replayed


@pytest.mark.parametrize("tokens, num_blocks", [(2048, 500), (37, 500), (37, 14)])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_mapped_memory(checkpoint, tokens, num_blocks, mode):
    """vAttention: its pages have 2 MiB, of which a block of this model fills little."""
    path, prompts, expected = checkpoint
    for _ in range(2):  # the second engine gets the memory of the first
        llm = LLM(
            path, dtype="float32", attention_backend="vattention", max_num_batched_tokens=tokens,
            num_blocks=num_blocks, max_num_seqs=24, preemption_mode=mode, swap_gib=0.1,
        )  # fmt: skip
        for _ in range(2):
            assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
        check_blocks(llm.block_manager, [])
        del llm


def test_a_seed_gives_the_same_tokens_in_any_company(checkpoint):
    """And whether steps overlap or not."""
    path, prompts, _ = checkpoint
    options = dict(dtype="float32", num_blocks=500)
    llm, plain = LLM(path, overlap=True, **options), LLM(path, overlap=False, **options)
    params = [
        SamplingParams(max_tokens=8, seed=i, top_p=0.9 if i % 2 else 1.0)
        for i in range(len(prompts))
    ]
    together = token_ids(llm.generate(prompts, params, use_tqdm=False))
    alone = [token_ids(plain.generate([p], q, use_tqdm=False))[0] for p, q in zip(prompts, params)]
    assert together == alone


@pytest.mark.parametrize(
    "head_dim, group, block_size, dtype, mode",
    [
        (64, 1, 2, "float32", "swap"),
        (80, 2, 16, "float32", "swap"),
        (96, 7, 32, "float32", "recompute"),
        (128, 4, 16, "float16", "recompute"),
        (256, 1, 16, "bfloat16", "swap"),
    ],
)
def test_shapes_of_models(tmp_path, head_dim, group, block_size, dtype, mode):
    """Recorded steps, chunks, hits, copies, swaps; samples, beams, draft tokens, filters, penalties."""
    model = new_model("qwen3", head_dim=head_dim, num_attention_heads=2 * group)
    path = save(model, tmp_path)
    prompts = [[7, 8, 9] * n for n in (1, 3, 6, 11, 14, 14)]
    params = [
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(n=2, seed=3, max_tokens=14, top_p=0.9),
        BeamSearchParams(beam_width=2, max_tokens=6),
        SamplingParams(seed=5, max_tokens=8, top_k=5, min_p=0.01, repetition_penalty=1.2),
        SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=20, allowed_token_ids=[3, 4, 5]),
    ]
    answers = []
    for backend in ("torch", "triton"):
        llm = LLM(
            path, dtype=dtype, attention_backend=backend, num_blocks=64 // block_size + 1, block_size=block_size,
            max_num_batched_tokens=24, max_num_seqs=8, max_model_len=64, preemption_mode=mode, swap_gib=0.01,
            speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        )  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([[output.token_ids for output in result.outputs] for result in outputs])
        stats = llm.stats()
        assert stats["accepted_draft_tokens"] > 0 and (stats["preemptions"] > 0 or block_size == 32)
        check_blocks(llm.block_manager, [])
    assert answers[0] == answers[1] or dtype != "float32"


def test_memory_stays_within_what_was_granted(tmp_path):
    path = save(new_model("qwen3", head_dim=64, max_position_embeddings=32768), tmp_path)
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    share = 1 - free_before / total + 0.3
    llm = LLM(path, gpu_memory_utilization=share, max_num_seqs=4096, max_num_batched_tokens=8192)
    llm.generate([[1] * 3000] * 64, SamplingParams(max_tokens=16, ignore_eos=True), use_tqdm=False)
    free_after, _ = torch.cuda.mem_get_info()
    assert total - free_after <= share * total + 2**30, "more than granted"
    assert llm.runner.kv_cache.tensor.nbytes > 0.2 * total, "much was left unused"


def test_another_thread_launches_on_the_right_device(checkpoint):
    """The current device belongs to the thread, and Triton launches there."""
    path, prompts, expected = checkpoint
    llm = LLM(
        path,
        dtype="float32",
        num_blocks=500,
        max_num_seqs=24,
        device=f"cuda:{torch.cuda.device_count() - 1}",
    )
    with ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(llm.generate, prompts, GREEDY, use_tqdm=False).result()
    assert token_ids(outputs) == expected


def test_an_engine_outlives_another(checkpoint):
    """Graphs of two engines share no memory: not even when that of the first is overwritten."""
    path, prompts, expected = checkpoint
    options = {"dtype": "float32", "num_blocks": 500, "max_num_seqs": 24}
    first = LLM(path, **options)
    assert token_ids(first.generate(prompts, GREEDY, use_tqdm=False)) == expected
    second = LLM(path, **options)
    assert token_ids(second.generate(prompts, GREEDY, use_tqdm=False)) == expected
    del first
    gc.collect()
    torch.cuda.empty_cache()
    rubbish = torch.full((2**28,), torch.nan, device="cuda")
    assert token_ids(second.generate(prompts, GREEDY, use_tqdm=False)) == expected
    del rubbish


def test_nothing_is_compiled_while_serving(tmp_path):
    """Heads and sizes as in no other test: what another one has compiled does not count."""
    model = new_model("qwen3", hidden_size=88, intermediate_size=104, head_dim=24, vocab_size=170)
    llm = LLM(save(model, tmp_path), num_blocks=500, max_num_batched_tokens=100, max_num_seqs=24)
    rng = random.Random(0)
    kinds = [GREEDY, SamplingParams(max_tokens=9), SamplingParams(n=3, max_tokens=20)]
    prompts = [[rng.randrange(160) for _ in range(rng.randint(1, 200))] for _ in range(30)]
    compiled: list[str] = []
    hook = "jit_post_compile_hook"  # also of what is found compiled on the disk
    with mock.patch.object(triton.knobs.runtime, hook, lambda *, repr, **_: compiled.append(repr)):
        for count in (1, 30):
            llm.generate(prompts[:count], (kinds * 10)[:count], use_tqdm=False)
    assert compiled == []


def test_one_rank_through_nccl():
    """Its collectives are recorded, too, and nothing hangs at the end: so in a process of its own."""
    code = """
from thread_group import one_rank
from nanovllm import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=12)
prompts = ["Once upon a time", "17 + 25 ="]
expected = LLM(device="cuda:0").generate(prompts, params, use_tqdm=False)
llm = one_rank("cuda:0")
outputs = llm.generate(prompts, params, use_tqdm=False)
for output, one in zip(outputs, expected, strict=True):
    assert output.outputs[0].token_ids == one.outputs[0].token_ids
assert llm.runner.recorder is not None
del llm
"""
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "tests" / "tools")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=180)
