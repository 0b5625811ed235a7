"""The runner's step: the example in `prepare`'s docstring is true, and nothing of a step stays behind.

Run: pytest tests/test_runner.py [-k example]
"""

import gc
import re
import weakref

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.layers import torch_attention, torch_ops
from nanovllm.layers.batch import Batch
from nanovllm.model_runner import ModelRunner
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Request


@pytest.fixture(scope="module")
def llm():
    return LLM(num_blocks=100, block_size=4, device="cpu", attention_backend="torch")


def test_the_example_of_prepare_is_true(llm):
    """Every row of it that the step holds, number by number."""
    first, second = (
        Request(name, None, [7] * length, SamplingParams(temperature=0))
        for name, length in (("a", 5), ("b", 3))
    )
    first, second = first.sequences[0], second.sequences[0]
    first.block_table, second.block_table = [7, 2], [5]
    schedule = Schedule()
    schedule.add(Item(first, 4, 1))
    schedule.add(Item(second, 0, 3))
    step = llm.runner.prepare(schedule)
    said = dict(
        re.findall(r"^ +(\w+) +(\[.*?\](?=  |$))", ModelRunner.prepare.__doc__, re.MULTILINE)
    )
    found = {
        "block_tables": step.batch.block_tables,
        "cu_blocks": step.batch.cu_blocks,
        "contexts": step.batch.context_lens,
        "ends": step.batch.cu_seqlens_q[1:],
        "positions": step.positions,
        "slots": step.batch.slot_mapping,
        "sampled_rows": step.sampled_rows,
    }
    assert {name: eval(said[name]) for name in found} == {
        name: tensor.tolist() for name, tensor in found.items()
    }
    assert eval(said["counts"]) == step.batch.cu_seqlens_q.diff().tolist()
    assert eval(said["starts"]) == [item.start for item in schedule.items]
    seq_of_token = [b for b, count in enumerate(eval(said["counts"])) for _ in range(count)]
    assert eval(said["seq_of_token"]) == seq_of_token and step.sampling is None


def test_a_step_leaves_nothing_behind(llm, monkeypatch):
    """No cycle keeps a step's memory, or the KV cache, until Python collects garbage."""
    alive, init = [], Batch.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        alive.append(weakref.ref(self))

    monkeypatch.setattr(Batch, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        llm.generate(
            [[1] * 9, [2] * 3], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False
        )
        assert len(alive) >= 5 and not any(batch() for batch in alive)
    finally:
        gc.enable()


def test_the_layout_is_made_once_per_step(llm, monkeypatch):
    made = []

    class Noted(torch_attention.Layout):
        def __init__(self, batch):
            made.append(batch)
            super().__init__(batch)

    monkeypatch.setattr(torch_ops, "Layout", Noted)
    monkeypatch.setattr(torch_attention, "Layout", Noted)
    steps = llm.stats()["steps"]
    llm.generate([[1] * 9, [2] * 3], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert len(made) == llm.stats()["steps"] - steps > 0 and llm.runner.ops is torch_ops
