"""Models with experts: as in transformers, in any batch; grouped products; ties of the router; what is refused.

Run: pytest tests/core/test_experts.py [-k transformers] [--slow]
"""

import json
import random
from importlib import import_module

import pytest
import torch
from backends import DEVICE, PROBLEM, backends, device_of, ops_of, surrounded
from checkpoints import check_answers, new_model, random_groups, save
from extras import needs

from nanovllm import LLM, SamplingParams
from nanovllm.layers.experts import Pairs, choose
from nanovllm.loader import load_config
from nanovllm.models.experts import Router
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.quantization.groups import Groups, dequantized

GREEDY = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=1
)


@pytest.mark.slow(but_every=30)
@pytest.mark.parametrize("seed", range(8))  # seeds to 99 have passed
def test_like_transformers(seed, tmp_path):
    """In chunks of 1 to 64 tokens, with preemption, from both layouts of the files."""
    rng = random.Random(seed)
    num_experts = rng.choice([1, 2, 5, 8, 16])
    model = new_model(
        "qwen3_moe", seed, num_experts=num_experts, num_experts_per_tok=rng.randint(1, min(num_experts, 4)),
        norm_topk_prob=rng.random() < 0.5, decoder_sparse_step=rng.choice([1, 1, 2]),
        mlp_only_layers=rng.choice([[], [], [0], [1]]), num_hidden_layers=rng.randint(1, 4),
        hidden_size=rng.choice([32, 48, 64]), moe_intermediate_size=rng.choice([8, 24, 40]),
        num_key_value_heads=rng.choice([1, 2, 4]), head_dim=rng.choice([8, 16, 32]),
        attention_bias=rng.random() < 0.3, tie_word_embeddings=rng.random() < 0.5,
    )  # fmt: skip
    path = save(model, tmp_path, save_original_format=rng.random() < 0.5)
    lengths = [*(rng.randint(20, 25) for _ in range(4)), rng.randint(60, 90)]
    prompts = [[rng.randrange(160) for _ in range(length)] for length in lengths]
    chunk = rng.choice([1, 2, 4, 8, 16, 33, 64])
    llm = LLM(
        path, dtype="float32", attention_backend=rng.choice(["auto", "torch"]), block_size=4, num_blocks=27,
        max_model_len=104, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 4), swap_gib=0.01,
        preemption_mode=rng.choice(["recompute", "swap"]),
    )  # fmt: skip
    check_answers(model, llm, prompts, GREEDY, tolerance=1e-4)
    assert llm.stats()["preemptions"] > 0 or chunk < 64
    check_blocks(llm.block_manager, [])


# --- grouped products ---


def random_choice(num_rows: int, num_experts: int, top: int, seed: int = 0):
    """As a router chooses: each row has `top` different experts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_rows, num_experts, generator=generator).topk(top).indices.flatten()


def random_pairs(num_rows: int, num_experts: int, top: int) -> Pairs:
    chosen = random_choice(num_rows, num_experts, top)
    order = chosen.argsort(stable=True)
    return Pairs(order, chosen.bincount(minlength=num_experts).cumsum(0), top)


def counts_of(pairs: Pairs):
    """The pairs of each expert."""
    return pairs.ends.diff(prepend=torch.zeros(1, dtype=torch.int64))


SHAPES = [(1, 8, 3), (3, 1, 1), (40, 3, 2), (9, 5, 5), (70, 32, 8), (40, 16, 4), (130, 2, 1)]


def exact_product(x, matrices, pairs: Pairs):
    """In float64, on the CPU."""
    parts = zip(pairs.rows.split(counts_of(pairs).tolist()), matrices)
    return torch.cat([x[rows].double() @ matrix.double().T for rows, matrix in parts])


def check_near(found, exact) -> None:
    most = 1e-6 if found.dtype == torch.float32 else 1e-2
    assert ((found.cpu() - exact).norm(dim=1) / exact.norm(dim=1)).max() < most


@pytest.mark.slow(but_every=13)
@pytest.mark.parametrize("num_rows, num_experts, top", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@backends()
def test_a_grouped_product(backend, dtype, num_rows, num_experts, top):
    """No matrix of an expert without rows is read: it is NaN, and so is what lies around the matrices and rows."""
    ops = ops_of(backend)
    if backend == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    pairs = random_pairs(num_rows, num_experts, top)
    x = torch.randn(num_rows, 100).to(dtype)
    matrices = torch.randn(num_experts, 70, 100).to(dtype)
    exact = exact_product(x, matrices, pairs)
    matrices[counts_of(pairs) == 0] = torch.nan
    device = device_of(backend)
    for place in (lambda part: part.to(device), lambda part: surrounded(part).to(device)):
        own = Pairs(*map(place, pairs[:2]), top)
        found = ops.grouped_product(place(x), place(matrices), own)
        check_near(found, exact)
        rows = x[pairs.rows]  # sorted: the results go back to where the pairs were
        back = ops.grouped_product(place(rows), place(matrices), own._replace(top=0))
        check_near(back, torch.empty_like(exact).index_copy_(0, pairs.order, exact))


@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
@pytest.mark.slow(but_every=15)
@pytest.mark.parametrize("num_rows, num_experts, top", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_grouped_product_of_codes(bits, dtype, num_rows, num_experts, top):
    """In Triton."""
    needs("triton")
    triton_product = import_module("nanovllm.topics.quantization.triton_product")
    pairs = random_pairs(num_rows, num_experts, top)
    x = torch.randn(num_rows, 192).to(dtype)
    weight = random_groups(70 * num_experts, 3, 64, bits)
    exact = exact_product(x, dequantized(weight).unflatten(0, (num_experts, 70)), pairs)
    for place in (lambda part: part.to(DEVICE), surrounded):
        groups = Groups(*(part if part is None else place(part) for part in weight))
        found = triton_product.product(place(x), groups, Pairs(*map(place, pairs[:2]), top))
        check_near(found, exact)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("num_rows, num_experts, top", [*SHAPES, (512, 128, 8), (5, 4, 2)])
def test_there_are_enough_tiles_for_any_choice(num_rows, num_experts, top, rows):
    """As many as shapes say, whatever is chosen: a CUDA graph replays the same launch."""
    needs("triton")
    triton_products = import_module("nanovllm.layers.triton_products")
    even = torch.arange(num_rows * top) % num_experts
    same = torch.arange(top).repeat(num_rows)
    most = triton_products.most_tiles(num_rows * top, num_experts, rows)
    for experts in (random_choice(num_rows, num_experts, top), even, same):
        counts = experts.bincount(minlength=num_experts)
        assert (counts / rows).ceil().sum() <= most


# --- the router ---


def test_weights_and_ties_of_the_router():
    """By hand. Of equal logits, the first ones are chosen."""
    config = new_model("qwen3_moe", hidden_size=2, num_experts=4, num_experts_per_tok=2).config
    for config.norm_topk_prob, expected in ((True, [0.5, 0.5]), (False, [0.25, 0.25])):
        router = Router(config).requires_grad_(False)
        router.weight.zero_()
        options = (router.top, router.is_normalized)
        weights, chosen = choose(router(torch.ones(1, 2)), *options)
        assert chosen.tolist() == [[0, 1]] and weights.tolist() == [expected]
    router.weight[3, 0] = torch.tensor(3.0).log()
    weights, chosen = choose(router(torch.tensor([[1.0, 0.0]])), *options)
    assert chosen.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 1 / 6]]))


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("num_experts, top", [(5, 5), (16, 3), (100, 8), (1, 1)])
@backends()
def test_the_choice_and_the_sum(backend, num_experts, top, is_normalized, dtype):
    """Half of the logits have a tie; the first of equal ones is chosen. Sums to the last bit, in any company."""
    ops, device = ops_of(backend), device_of(backend)
    generator = torch.Generator().manual_seed(num_experts)
    logits = 3 * torch.randn(7, num_experts, generator=generator)
    logits[::2] = logits[::2].round()
    expected, experts = choose(logits.to(dtype), top, is_normalized)
    weights, chosen = ops.experts().choose(logits.to(device, dtype), top, is_normalized)
    assert torch.equal(chosen.cpu(), experts) and weights.dtype == torch.float32
    torch.testing.assert_close(weights.cpu(), expected)
    padding = torch.full((1, num_experts), torch.nan, dtype=dtype, device=device)
    weights, chosen = ops.experts().choose(padding, top, is_normalized)
    assert weights.isnan().all() and chosen.tolist() == [[*range(top)]]
    y = torch.randn(7 * top, 1030, generator=generator).to(dtype)
    exact = (y.double().view(7, top, -1) * expected.double().unsqueeze(-1)).sum(1)
    total = ops.experts().add_up(y.to(device), expected.to(device))
    assert total.dtype == dtype
    check_near(total, exact)
    alone = ops.experts().add_up(y[-top:].to(device), expected[-1:].to(device))
    assert torch.equal(alone, total[-1:])


@backends(triton=0)
def test_tokens_do_not_depend_on_the_company(backend, tmp_path):
    """Also where each expert ties with another one, by equal rows of the router: the order of experts decides."""
    layers, lengths, max_tokens, num_blocks = 2, (1, 4, 9, 15), 12, 17
    if backend == "triton":  # its interpreter takes a minute and a half for all of it
        layers, lengths, max_tokens, num_blocks = 1, (9, 4, 1), 5, 10
    model = new_model(
        "qwen3_moe", num_experts=16, num_experts_per_tok=3, mlp_only_layers=[], num_hidden_layers=layers
    )  # fmt: skip
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[8:] = layer.mlp.gate.weight.data[:8]
    path = save(model, tmp_path)
    options = {"dtype": "float32", "block_size": 4, "attention_backend": backend, "max_num_seqs": 4}
    prompts = [[3, 4, 5] * n for n in lengths]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm = LLM(path, num_blocks=60, **options)
    alone = [
        llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts
    ]
    few = {"num_blocks": num_blocks, "max_model_len": 4 * num_blocks - 4}
    for tokens in (4, 7, 64) if backend != "triton" else (7,):
        llm = LLM(path, max_num_batched_tokens=tokens, **few, **options)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == alone
    assert llm.stats()["preemptions"] > 0


# --- what is refused ---


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("num_experts_per_tok", 9, "num_experts_per_tok=9 is not an integer from 1 to 8"),
        ("num_local_experts", 0, "num_experts=0 is not an integer from 1"),
        ("moe_intermediate_size", -1, "moe_intermediate_size=-1 is not an integer"),
        ("decoder_sparse_step", 0, "decoder_sparse_step=0 is not an integer"),
        ("hidden_act", "gelu", "hidden_act='gelu' is not supported"),
    ],
)
def test_configs_that_are_refused(field, value, words, tmp_path):
    save(new_model("qwen3_moe"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {field: value}))
    with pytest.raises(ValueError, match=words):
        load_config(tmp_path)
