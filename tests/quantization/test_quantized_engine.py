"""Engines with quantized weights: near the plain model, the same tokens in any company, little memory while they load.

Run: pytest tests/quantization/test_quantized_engine.py [-k company]
"""

from pathlib import Path

import pytest
import torch
from checkpoints import new_model, save
from thread_group import Threads

from nanovllm import LLM, SamplingParams, loader
from nanovllm.backends import torch_ops
from nanovllm.config import Config
from nanovllm.layers.linear import Linear
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.quantization import int8, layers
from tutorials.machine import installed, interpreter_problem

FORMS = ["int8", "int4"]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}  # groups of 64, 128 and 32
PROMPT = [*range(1, 60)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(new_model(**SIZES), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A model in which each token uses all experts: a rounded row could choose other ones."""
    sizes = SIZES | {"intermediate_size": 128, "moe_intermediate_size": 64}
    sizes["num_experts_per_tok"] = 8
    return save(new_model("qwen3_moe", **sizes), tmp_path_factory.mktemp("experts"))


def first_logprobs(llm, prompt=PROMPT) -> dict[int, float]:
    """Of the 20 likeliest tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].logprobs[0]


def check_near(logprobs, others, most):
    both = logprobs.keys() & others.keys()
    assert len(both) > 12
    errors = [abs(logprobs[i] - others[i]) for i in both]
    assert max(errors) < most, errors


@pytest.mark.parametrize("form, most", [("int8", 0.5), ("int4", 4)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_near_the_plain_one(tied, form, most, tmp_path):
    """Also a head that is tied to the embedding, which stays as it is."""
    path = save(new_model(tie_word_embeddings=tied, **SIZES), tmp_path)
    options = {"dtype": "float32", "num_blocks": 50, "enforce_eager": True}
    llm = LLM(path, quantization=form, **options)
    check_near(first_logprobs(LLM(path, **options)), first_logprobs(llm), most)
    assert llm.runner.model.model.embed_tokens.weight.dtype == torch.float32


@pytest.mark.parametrize("form, most", [("int8", 0.5), ("int4", 4)])
def test_experts_are_near_the_plain_ones(experts, form, most):
    """The router is not quantized. With few rows in 4 bits, one kernel computes all experts: the same numbers."""
    options = {"dtype": "float32", "num_blocks": 50}
    llm = LLM(experts, quantization=form, **options)
    check_near(first_logprobs(LLM(experts, **options)), first_logprobs(llm), most)
    mlp = llm.runner.model.model.layers[0].mlp
    assert mlp.experts.gate_up_proj.weight.is_meta and not mlp.gate.weight.is_meta
    x = torch.randn(17, 64)
    torch.testing.assert_close(mlp(x), torch.cat([mlp(row) for row in x.split(1)]))
    with Threads(experts, 2, quantization=form, **options) as split:
        check_near(
            first_logprobs(LLM(experts, quantization=form, **options)), first_logprobs(split), most
        )


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("form", FORMS[::-1])
def test_tokens_do_not_depend_on_the_company(path, form):
    """Nor on chunks, preemption and draft tokens."""
    prompts = [[3, 4, 5] * n for n in (1, 4, 9, 15)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=12) for i in range(4)]
    # one call would be compiled for each form: test_numba_step.py has them
    options = {"dtype": "float32", "quantization": form, "block_size": 4, "enforce_eager": True}
    plain = LLM(path, num_blocks=60, **options)
    alone = [
        plain.generate([prompt], one, use_tqdm=False)[0].outputs[0].token_ids
        for prompt, one in zip(prompts, params)
    ]
    for mode in ("swap", "recompute"):
        llm = LLM(
            path, num_blocks=17, max_model_len=64, max_num_batched_tokens=7, max_num_seqs=4,
            preemption_mode=mode, swap_gib=0.01, **options,
            speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        )  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == alone
        assert llm.stats()["preemptions"] > 0 and llm.stats()["draft_tokens"] > 0
        check_blocks(llm.block_manager, [])


@pytest.mark.skipif(interpreter_problem() is not None, reason="no interpreter")
@pytest.mark.skipif(installed("triton") is None, reason="needs triton")
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_triton_is_near_pytorch(path, form, monkeypatch):
    """It does not round activations."""
    monkeypatch.setattr(int8, "largest_code", lambda: 0)
    options = {"dtype": "float32", "num_blocks": 50, "quantization": form}
    ours, theirs = (LLM(path, attention_backend=name, **options) for name in ("torch", "triton"))
    held = theirs.runner.model.model.layers[0].mlp.down_proj.quantized
    assert held.multiply.__module__ == "nanovllm.topics.quantization.triton_product"
    check_near(first_logprobs(ours, PROMPT[:9]), first_logprobs(theirs, PROMPT[:9]), 0.5)


@pytest.mark.cpu
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_are_near_one(path, form):
    """In groups of 4 bits the numbers are the same: 128 divides the rows of each rank. In 8 bits a row is a group."""
    path = save(new_model(**SIZES | {"intermediate_size": 256, "head_dim": 64}), path + form)
    options = {"dtype": "float32", "num_blocks": 50, "attention_backend": "torch"}
    options["quantization"] = form
    with Threads(path, 2, **options) as llm:
        most = 0.5 if form == "int8" else 1e-4
        check_near(first_logprobs(LLM(path, **options)), first_logprobs(llm), most)


@pytest.mark.parametrize("form", FORMS)
def test_layers_are_quantized_while_the_model_loads(path, form, monkeypatch):
    """So that two matrices at most have 16 or 32 bits at a time, on a GPU, too."""
    models, counts = [], []
    new_model, quantize = loader.new_model, layers.in_few_bits

    def new(*args):
        models.append(new_model(*args))
        return models[0]

    def noted(*args, **kwargs):
        linears = [layer for layer in models[0].model.modules() if isinstance(layer, Linear)]
        counts.append(sum(not linear.weight.is_meta for linear in linears))
        return quantize(*args, **kwargs)

    monkeypatch.setattr(loader, "new_model", new)
    monkeypatch.setattr(layers, "in_few_bits", noted)
    llm = LLM(path, dtype="float32", quantization=form, num_blocks=20, enforce_eager=True)
    assert counts == [1, 1, 2, 1] * 2 + [0]  # o_proj lies among the parts of qkv_proj
    assert llm.runner.weights_per_layer > 64 * 3 * 96  # which decides on the number of threads


def test_what_cannot_be_quantized(path, tmp_path, monkeypatch):
    """Nor shared by ranks."""
    monkeypatch.setattr(loader, "new_model", lambda *_: pytest.fail("a model"))
    other = save(new_model(), tmp_path)
    with pytest.raises(
        ValueError, match="quantization='int3' is not allowed: it must be 'int8' or 'int4'"
    ):
        LLM(other, quantization="int3")
    words = "quantization='int4' is not possible .*: groups of 32 .* rows of 48"
    with pytest.raises(ValueError, match=words):
        LLM(other, quantization="int4")
    config = Config(quantization="int4", tensor_parallel_size=2)
    words = "tensor_parallel_size=2: groups of 32 numbers do not divide rows of 48"
    with pytest.raises(ValueError, match=words):
        layers.quantizer(config, loader.load_config(Path(path)), torch_ops)
