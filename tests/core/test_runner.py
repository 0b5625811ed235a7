"""The runner's step: the example in `prepare`'s docstring is true, and nothing of a step stays behind.

Run: pytest tests/core/test_runner.py [-k example]
"""

import gc
import os
import re
import weakref
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config, Limits
from nanovllm.device.choose import choose_device
from nanovllm.device.memory import memory_left
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import CacheShape
from nanovllm.model_runner import ModelRunner
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Request


@pytest.fixture(scope="module")
def llm():
    return LLM(num_blocks=100, block_size=4, device="cpu", attention_backend="torch")


def test_the_log_says_how_large_the_cache_is(caplog):
    with caplog.at_level("INFO", logger="nanovllm"):
        LLM(num_blocks=3000, block_size=16, device="cpu")
    (said,) = [one.getMessage() for one in caplog.records if "KV cache" in one.getMessage()]
    assert said == "KV cache: 3,000 blocks of 16 tokens, 0.1 GiB"


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
    found = {name: tensor.tolist() for name, tensor in found.items()}
    assert found == {name: eval(said[name]) for name in found}
    assert eval(said["counts"]) == step.batch.cu_seqlens_q.diff().tolist()
    assert eval(said["starts"]) == [item.start for item in schedule.items]
    seq_of_token = [b for b, count in enumerate(eval(said["counts"])) for _ in range(count)]
    assert eval(said["seq_of_token"]) == seq_of_token and step.sampling is None
    assert step.batch.num_decodes == 1
    schedule.items.reverse()  # the decode comes first all the same
    second.block_table.append(9)  # a later chunk will need it
    assert llm.runner.prepare(schedule).batch.block_tables.tolist() == [7, 2, 5, 9]


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


@pytest.mark.parametrize("asked, chosen", [("auto", 1), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_has_a_number(monkeypatch, asked, chosen):
    """Without one it would be another one in a thread with another current device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choose_device(Config(device=asked)) == torch.device("cuda", chosen)


def test_room_for_the_block_that_is_swapped(monkeypatch):
    """A block of 72B with 256 tokens has 84 MB."""
    said = {"mem_get_info": (2**30, 2**31), "memory_reserved": 0, "max_memory_reserved": 0}
    said |= {"empty_cache": None, "synchronize": None, "reset_peak_memory_stats": None}
    for name, answer in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    config = Config(preemption_mode="swap", gpu_memory_utilization=1.0)
    config.enforce_eager = True
    limits = Limits(max_model_len=4, max_num_seqs=1, max_num_batched_tokens=4)
    runner = SimpleNamespace(
        device=torch.device("cuda"), limits=limits, caches=0, kv_cache=0, draft=None
    )
    runner.allocate = lambda *_: vars(runner).update(caches=0, kv_cache=0)
    runner.launch = lambda schedule: None
    for block_bytes in (2**20, 2**28):
        runner.shape = SimpleNamespace(block_bytes=block_bytes, block_size=4)
        assert memory_left(runner, config) == 2**30 - block_bytes


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_does_not_write_into_our_cache():
    cache = CacheShape(2, 4, 1, 8, torch.float32).new_cache(10, torch.device("cpu"))
    cache.tensor.fill_(1.0)
    child = os.fork()
    if child == 0:
        cache.tensor.fill_(2.0)
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert cache.tensor.unique().tolist() == [1.0]
