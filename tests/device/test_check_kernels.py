"""Kernels that compute wrong numbers on a machine are named before a request comes.

Run: pytest tests/device/test_check_kernels.py [--slow]
"""

from types import SimpleNamespace

import pytest
import torch
from checkpoints import new_model, save
from extras import needs

from nanovllm import LLM, model_runner
from nanovllm.backends import torch_ops
from nanovllm.backends.cuda_graphs import StepGraphs
from nanovllm.model_runner import ModelRunner
from nanovllm.topics.checks import kernels
from nanovllm.topics.checks.kernels import check_kernels

SMALL = {"num_blocks": 12, "max_model_len": 64, "max_num_seqs": 2, "check_kernels": "never"}


@pytest.fixture
def backend(monkeypatch):
    """A backend of which a test may spoil an operation."""
    ops = SimpleNamespace(**vars(torch_ops))
    monkeypatch.setattr(model_runner, "choose_ops", lambda *_: ops)
    return ops


def refused(runner: ModelRunner) -> str:
    """What the sentence says is wrong."""
    with pytest.raises(ValueError, match="take attention_backend='torch'") as error:
        check_kernels(runner)
    _, _, message = str(error.value).partition("differ from PyTorch's here: ")
    return message.partition(";")[0]


def test_right_kernels_leave_nothing_behind(backend):
    with LLM(**SMALL) as llm:
        before = torch.random.get_rng_state()
        check_kernels(llm.runner)
        assert torch.equal(torch.random.get_rng_state(), before)
        assert llm.runner.num_blocks == 1 or not llm.runner.kv_cache.tensor.any()
        model = llm.runner.model
        owners = [module for module in model.modules() if hasattr(module, "ops")]
        assert all(module.ops is backend for module in owners)
        assert len(model.model.layers) > 2 and len(owners) > len(model.model.layers)


@pytest.mark.parametrize(
    "name", ["add_and_norm", "rotate_and_store", "silu_and_mul", "paged_attention"]
)
def test_a_wrong_kernel_is_named(backend, name):
    right = getattr(torch_ops, name)

    def wrong(*args):
        if name == "rotate_and_store":
            q, k, v = args[0].split(args[3], dim=1)
            return right(torch.cat([q, v, k], dim=1), *args[1:])
        result = right(*args)
        last = result[-1] if isinstance(result, tuple) else result
        last *= torch.linspace(0.8, 1.2, last.shape[-1], device=last.device)
        return result

    setattr(backend, name, wrong)
    with LLM(**SMALL) as llm:
        named = refused(llm.runner)
    assert named.startswith(f"{name} ") and "," not in named


def test_a_number_that_is_none_is_wrong(backend):
    backend.silu_and_mul = lambda x: torch_ops.silu_and_mul(x) * torch.nan
    with LLM(**SMALL) as llm:
        assert refused(llm.runner) == "silu_and_mul nan%"


def test_all_that_is_wrong_is_named(backend):
    """Blocks that are not copied, and another draw."""
    backend.copy_blocks = lambda kv_cache, copies: None
    backend.sample = lambda logits, sampling: logits.argmax(-1)
    with LLM(**SMALL) as llm:
        assert refused(llm.runner).startswith("copy_blocks 100%, sample ")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int4", None])
def test_experts(form, tmp_path):
    """In bfloat16: with rows that are rounded otherwise, a router may choose other experts."""
    needs("numba")
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 32}
    sizes |= {"num_experts": 64, "num_experts_per_tok": 8}
    model = new_model("qwen3_moe", hidden_size=256, **sizes).bfloat16()
    for name, parameter in model.named_parameters():
        parameter.data.mul_(0.2 if "norm" not in name else 1)
    path = save(model, tmp_path)
    options = {"dtype": "bfloat16", "attention_backend": "numba", "quantization": form}
    with LLM(path, **SMALL | {"check_kernels": "always"} | options) as llm:
        stack = llm.runner.model.model.layers[-1].mlp.experts.down_proj
        right = stack.product
        stack.product = lambda *args: right(*args).roll(1, 0)
        assert refused(llm.runner).startswith("the grouped product ")


@pytest.mark.slow
def test_triton_is_right_and_a_wrong_replay_is_named(monkeypatch):
    """A replay is a plain call on a CPU."""
    right = StepGraphs.run

    def wrong(self, *args):
        hidden, step = right(self, *args)
        return hidden.roll(1, dims=1), step

    options = {"attention_backend": "triton", "dtype": "float32", "check_kernels": "always"}
    with LLM(**SMALL | options) as llm:
        monkeypatch.setattr(StepGraphs, "run", wrong)
        named = refused(llm.runner)
    assert named.startswith("a recorded step ") and "," not in named


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 1, "max_model_len": 16},
        {"block_size": 1, "num_blocks": 64},
        {"attention_backend": "torch", "kv_cache_dtype": "int8"},
        pytest.param({"dtype": "float16", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        {"dtype": "bfloat16"},
        pytest.param({"attention_backend": "vattention"}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, marks=[pytest.mark.slow, pytest.mark.cpu]),
    ],
)
def test_any_engine_may_ask_for_it(options):
    with LLM(**SMALL | {"check_kernels": "always"} | options) as llm:
        assert llm.runner.num_blocks == 1 or not llm.runner.kv_cache.tensor.any()
        (output,) = llm.generate("1 + 1", use_tqdm=False)
        assert output.outputs[0].token_ids


@pytest.mark.parametrize("where, num_checks", [("cuda", 0), ("never", 0), ("always", 1)])
def test_on_a_cpu_it_is_done_on_demand(monkeypatch, where, num_checks):
    checked = []
    monkeypatch.setattr(kernels, "check_kernels", checked.append)
    with LLM(**SMALL | {"check_kernels": where}, device="cpu"):
        assert len(checked) == num_checks
