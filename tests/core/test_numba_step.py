"""The decode of few sequences in one call, against the same step layer by layer.

Run: pytest tests/core/test_numba_step.py [-k interrupt]
"""

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch
from checkpoints import greedy, new_model, save
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from nanovllm import LLM, SamplingParams
from nanovllm.backends import numba_ops
from nanovllm.models.dense import MLP
from nanovllm.topics.checks.kernels import hidden_states, step_of

are_fastest = pytest.importorskip("nanovllm.layers.numba_tiles").are_fastest
numba_graphs = pytest.importorskip("nanovllm.backends.numba_graphs")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FORMS = [
    ("qwen3", {}),
    ("qwen2", {}),
    ("llama", {"dtype": "bfloat16"}),
    ("qwen2", {"quantization": "int4", "dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    ("qwen2", {"quantization": "int8"}),
    ("qwen3", {"dtype": "float16", "kv_cache_dtype": "int8"}),
    ("llama", {"quantization": "int8", "dtype": "bfloat16"}),
]


def new_llm(path: str | None = None, **options) -> LLM:
    options = {"dtype": "float32", "attention_backend": "numba", "num_blocks": 200} | options
    return LLM(*[path] * (path is not None), max_model_len=256, **options)


def on_threads(monkeypatch, num_threads: int) -> None:
    monkeypatch.setattr(numba_graphs, "SMALL", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)


@pytest.mark.slow(but_every=14)
@pytest.mark.parametrize("num_threads", [5, 1])
@pytest.mark.parametrize("family, options", FORMS)
def test_it_computes_what_the_layers_compute(tmp_path, monkeypatch, family, options, num_threads):
    """To the last bit, but where oneDNN or PyTorch multiplies: they add in another order."""
    sizes = dict(hidden_size=96, intermediate_size=160, num_attention_heads=4, head_dim=16)
    llm = new_llm(save(new_model(family, **sizes), tmp_path), **options)
    runner = llm.runner
    assert isinstance(runner.recorder, numba_graphs.NumbaStep)
    on_threads(monkeypatch, num_threads)
    cache = runner.kv_cache
    numbers = cache.restored(cache.tensor, torch.float32).normal_()
    cache.tensor.copy_(cache.stored(numbers, cache.tensor.dtype))
    with torch.inference_mode():
        for num_seqs in (1, 3, min(11, runner.recorder.sizes[-1])):
            step = step_of(runner, 17, [1] * num_seqs)
            expected = hidden_states(runner, step, numba_ops)
            logits = runner.model.lm_head(expected)
            written = cache.tensor.clone()
            step = step_of(runner, 17, [1] * num_seqs)
            step.sampled_rows = torch.arange(num_seqs)
            hidden, step = runner.forward(step)
            hidden = hidden.clone()
            assert step.logits is not None
            is_exact = "quantization" in options or are_fastest(runner.dtype)
            is_coarse = runner.dtype == torch.bfloat16 or cache.tensor.dtype == torch.int8
            close = 0 if is_exact else 3e-2 if is_coarse else 4e-3
            close = 3e-5 if options == {} else close
            for found, right in ((hidden, expected), (step.logits, logits)):
                torch.testing.assert_close(found, right, rtol=close, atol=close)
            if is_exact:
                assert torch.equal(cache.tensor, written)
            alone, _ = runner.forward(step_of(runner, 17, [1]))
            assert torch.equal(alone[0], hidden[0]), "a row is the same in any company"


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_tokens_are_those_of_transformers(tmp_path, family):
    model = new_model(family)
    llm = new_llm(save(model, tmp_path))
    prompts = [[3, 4, 5], [7] * 9, [1, 2] * 8]
    for company in (prompts[:1], prompts, prompts * 2):  # recorded, recorded, layer by layer
        outputs = llm.generate(company, GREEDY, use_tqdm=False)
        found = [output.outputs[0].token_ids for output in outputs]
        assert found == [greedy(model, prompt, 12) for prompt in company]


def test_a_later_step_may_have_more_threads_than_the_first(monkeypatch):
    """They wait for each other, so all of them must run. On a busy machine the first step has few."""
    llm = new_llm()
    for num_threads in (2, 6):
        on_threads(monkeypatch, num_threads)
        recording = threading.Thread(target=llm.runner.recorder.record, args=(1,), daemon=True)
        recording.start()
        recording.join(60)
        assert not recording.is_alive()


@pytest.mark.slow
def test_openmp_may_give_fewer_threads():
    """Than it is asked for: then the step is shared between those that there are."""
    code = """
import torch
from nanovllm import LLM, SamplingParams
llm = LLM(attention_backend="numba", dtype="float32")
torch.get_num_threads = lambda: 4
print(llm.generate("12 + 30 =", SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0].text)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_THREAD_LIMIT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "42" in run.stdout, run.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_does_without_other_threads(monkeypatch):
    llm = new_llm()
    on_threads(monkeypatch, 2)
    record = numba_graphs.NumbaStep.record
    record(llm.runner.recorder, 1)
    child = os.fork()
    if child == 0:
        record(llm.runner.recorder, 1)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("is_global", [False, True])
def test_a_hook_on_a_layer_is_called(is_global):
    llm = new_llm()
    mlp = llm.runner.model.model.layers[1].mlp
    calls = []
    register = register_module_forward_hook if is_global else mlp.register_forward_hook

    def hook(module, inputs, result):
        if module is mlp:
            calls.append(len(result))

    handle = register(hook)
    llm.generate("7", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert calls[-2:] == [1, 1]
    handle.remove()
    llm.generate("7", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(calls) == 3


def replace_weight(layer, _):
    down = layer.mlp.down_proj
    down.weight = nn.Parameter(down.weight.clone().mul_(0), requires_grad=False)


def replace_data(layer, _):
    weight = layer.mlp.down_proj.weight
    weight.data = weight.data.clone().mul_(0)


class Nothing(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


CHANGES = {  # of a layer: in the end, the MLP adds nothing
    "in place": lambda layer, _: layer.mlp.down_proj.weight.mul_(0),
    "through data": lambda layer, _: layer.mlp.down_proj.weight.data.zero_(),
    "other data": replace_data,
    "another weight": replace_weight,
    "a norm": lambda layer, _: layer.post_attention_layernorm.weight.data.fill_(0),
    "another layer": lambda layer, _: setattr(layer, "mlp", Nothing()),
    "a function": lambda layer, _: setattr(layer.mlp, "forward", torch.zeros_like),
    "a method": lambda layer, patch: patch.setattr(MLP, "forward", Nothing.forward),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_after_the_load_counts(tmp_path, monkeypatch, caplog, name):
    path = save(new_model("qwen2"), tmp_path)
    answers = []
    for is_eager in (True, False):
        llm = new_llm(path, enforce_eager=is_eager, enable_prefix_caching=False)
        with torch.no_grad(), monkeypatch.context() as patch:
            for _ in range(2):
                answers.append(
                    llm.generate([3, 4, 5], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
                )
                for layer in llm.runner.model.model.layers:
                    CHANGES[name](layer, patch)
            llm.close()
    first, changed, *recorded = answers
    assert recorded == [first, changed] and first != changed
    assert caplog.text.count("a layer or weight has changed") == 1


def test_large_weights_have_no_second_form(monkeypatch, caplog):
    monkeypatch.setattr(numba_graphs, "MOST_COPIED", 2**20)
    with caplog.at_level(logging.INFO):
        llm = new_llm(quantization="int8")
    assert llm.runner.recorder is None
    assert "decodes run layer by layer: a second form of the weights takes 2 MiB" in caplog.text
