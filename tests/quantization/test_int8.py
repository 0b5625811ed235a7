"""Products of 8-bit weights and 8-bit activations: exact, the same in any batch, and through the whole engine.

Run: pytest tests/quantization/test_int8.py [-k exact]
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import new_model, save

from nanovllm import LLM, SamplingParams
from nanovllm.checks.blocks import check_blocks
from nanovllm.layers.linear import Linear
from nanovllm.quantization import int8

ANSWER = "from nanovllm.quantization import int8; print(int8.largest_activation())"


def products_of(backend, num_rows=9, num_in=300, num_out=40, dtype=torch.float32, bias=False):
    """x, the weight as it was, and the layer's result."""
    torch.manual_seed(0)
    linear = Linear(num_in, num_out, bias).requires_grad_(False)
    linear.weight.copy_(torch.randn(num_out, num_in) * torch.rand(num_out, 1))
    if bias:
        linear.bias.copy_(torch.randn(num_out))
    weight = linear.weight.clone()
    x = torch.randn(num_rows, num_in) * 10.0 ** torch.arange(-4, num_rows - 4).unsqueeze(1)
    with pytest.MonkeyPatch.context() as patch:
        if backend == "torch":
            patch.setattr(int8, "largest_activation", lambda: 0)
        int8.use_int8(linear)
    return x.to(dtype), weight, linear


def exact_product(x, weight, largest):
    (rows, scale), (codes, scales) = int8.quantize(x, largest), int8.quantize(weight)
    return (rows.double() @ codes.double().T) * scale.double() * scales.T.double()


def check_products(backend="onednn"):
    """Against a product in float64, and near that of the numbers themselves."""
    x, weight, linear = products_of(backend)
    largest = 127 if backend == "torch" else int8.largest_activation()
    result, expected = linear(x), exact_product(x, weight, largest)
    torch.testing.assert_close(result.double(), expected, atol=0, rtol=2e-5)
    plain = x @ weight.T
    error = (result - plain).norm(dim=1) / plain.norm(dim=1)
    assert error.max() < 2.5 / largest, error


ROOT = Path(__file__).parents[2]
BACKENDS = ["torch"] + ["onednn"] * (int8.largest_activation() > 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_are_exact(backend):
    check_products(backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_is_the_same_in_any_batch(backend, dtype):
    """To the last bit: integers are exact in any order."""
    x, _, linear = products_of(backend, num_in=2048, num_rows=7, dtype=dtype, bias=True)
    together = linear(x)
    assert together.dtype == dtype
    for i in range(len(x)):
        assert torch.equal(linear(x[i : i + 1])[0], together[i])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_sums_do_not_overflow(backend, sign):
    linear = Linear(4096, 8).requires_grad_(False)
    linear.weight.fill_(0.5)
    int8.use_int8(linear)
    torch.testing.assert_close(
        linear(sign * torch.ones(3, 4096)), torch.full((3, 8), sign * 2048.0)
    )


def test_a_row_of_zeros():
    x, _, linear = products_of("torch")
    assert not linear(x * 0).any()


@pytest.mark.slow
@pytest.mark.skipif("onednn" not in BACKENDS, reason="oneDNN has no such product here")
def test_a_cpu_that_adds_pairs_in_16_bits(monkeypatch):
    """AVX2 without VNNI: activations have seven bits there."""
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ANSWER], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["63"], done.stderr
    monkeypatch.setattr(int8, "largest_activation", lambda: 63)
    check_products()


# --- the engine ---


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(new_model("qwen3", head_dim=32), tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_near_the_plain_one(tied, tmp_path):
    """Also a head that is tied to the embedding, which stays as it is."""
    path = save(new_model("qwen3", tie_word_embeddings=tied), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    outputs = []
    for quantization in (None, "int8"):
        llm = LLM(path, dtype="float32", quantization=quantization, num_blocks=50)
        (output,) = llm.generate([[*range(1, 60)]], params, use_tqdm=False)
        outputs.append(output.outputs[0].logprobs[0])
    plain, near = outputs
    assert len(plain.keys() & near.keys()) > 12
    assert all(abs(plain[i] - near[i]) < 0.5 for i in plain.keys() & near.keys())
    assert llm.runner.model.model.embed_tokens.weight.dtype == torch.float32


def test_tokens_do_not_depend_on_the_company(path):
    """Nor on chunks, preemption and draft tokens."""
    prompts = [[3, 4, 5] * n for n in (1, 4, 9, 15)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=12) for i in range(4)]
    plain = LLM(path, dtype="float32", quantization="int8", num_blocks=60, block_size=4)
    alone = [
        plain.generate([prompt], one, use_tqdm=False)[0].outputs[0].token_ids
        for prompt, one in zip(prompts, params)
    ]
    for mode in ("swap", "recompute"):
        llm = LLM(
            path, dtype="float32", quantization="int8", num_blocks=17, block_size=4, max_model_len=64,
            max_num_batched_tokens=7, max_num_seqs=4, preemption_mode=mode, swap_gib=0.01,
            speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        )  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == alone
        assert llm.stats()["preemptions"] > 0 and llm.stats()["draft_tokens"] > 0
        check_blocks(llm.block_manager, [])


def test_layers_are_quantized_while_the_model_loads(path, monkeypatch):
    """So that never more than one layer has both forms."""
    forms = []

    def noted(linear):
        forms.append([layer.self_attn.o_proj.weight.dtype for layer in forms_of[0]])
        use_int8(linear)

    use_int8, forms_of = int8.use_int8, []
    from nanovllm import loader
    from nanovllm.quantization import layers

    new_model = loader.new_model

    def new(*args):
        model = new_model(*args)
        forms_of.append(model.model.layers)
        return model

    monkeypatch.setattr(loader, "new_model", new)
    monkeypatch.setattr(layers, "use_int8", noted)
    monkeypatch.setattr(int8, "largest_activation", lambda: 0)
    LLM(path, dtype="float32", quantization="int8", num_blocks=20)
    assert len(forms) == 2 * 4 + 1  # four of each layer, and the head
    assert all(form == torch.int8 for form in forms[-1])
    assert forms[4].count(torch.int8) == 1


def test_other_methods_are_refused():
    with pytest.raises(ValueError, match="quantization='int3' is not allowed: it must be 'int8'"):
        LLM(quantization="int3")
