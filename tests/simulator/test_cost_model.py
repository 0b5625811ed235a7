"""The cost model against counts made by hand, and against transformers; and what a benchmark makes of an engine's steps.

Run: pytest tests/simulator/test_cost_model.py [-k qwen3]
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm.config import EMBEDDED_MODEL
from nanovllm.topics.simulator.cost_model import (
    HARDWARE,
    SHAPES,
    Hardware,
    Shape,
    shape_of,
    work_of,
)
from tutorials.measure.steps import Step, roofline

SHAPE = Shape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, vocab=10, body=100, itemsize=2)


def test_work_of_a_decode_step():
    work = work_of(SHAPE, [(1, 5), (1, 8)], sampled=2)
    # weights, 2 embedding rows, the head; 13 keys and values read and 2 written, 2 layers x 3
    # numbers each
    assert work.bytes == 2 * (100 + 2 * 4 + 40 + (13 + 2) * 2 * 2 * 3) == 656
    assert work.kv_bytes == 2 * (13 + 2) * 2 * 2 * 3 and work.weight_bytes == 2 * (100 + 2 * 4 + 40)
    assert work.attention_flops == 4 * 2 * 2 * 3 * 13
    assert work.flops == 2 * 100 * 2 + 2 * 40 * 2 + work.attention_flops


def test_work_of_a_chunk_that_is_not_sampled():
    work = work_of(SHAPE, [(3, 5)], sampled=0)
    assert work.bytes == 2 * (100 + 3 * 4 + (5 + 3) * 2 * 2 * 3)  # no head
    assert work.flops == 2 * 100 * 3 + 4 * 2 * 2 * 3 * (3 + 4 + 5)


def test_what_a_shape_takes_in_memory():
    assert SHAPE.kv_bytes == 2 * 2 * 1 * 3 * 2
    assert SHAPE.weight_bytes == 2 * (100 + 40)
    assert SHAPE._replace(tied=False).weight_bytes == 2 * (100 + 80)


def test_qwen3_by_hand():
    """The numbers of chapter 00 for Qwen3-0.6B in bfloat16."""
    shape = shape_of(SHAPES["qwen3-0.6b"], 2)
    layer = 1024 * (16 + 2 * 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    assert shape.body == 28 * layer + 1024 == 440_467_456
    assert shape.kv_bytes == 114_688 and shape.head == 155_582_464
    assert shape.weight_bytes == 2 * 596_049_920
    step = work_of(shape, [(1, 1000)] * 16, 16)
    assert step.weight_bytes == 2 * (440_467_456 + 155_582_464 + 16 * 1024)
    assert step.kv_bytes == 16 * 1001 * 114_688
    assert step.flops == 16 * (2 * 596_049_920 + 4 * 28 * 16 * 128 * 1000)
    assert HARDWARE["h100"].floor(step) == step.bytes / 3.35e12  # memory is the limit
    prompt = work_of(shape, [(1000, 1000)], 1)
    assert HARDWARE["h100"].floor(prompt) == prompt.flops / 989e12  # and here it is arithmetic


def test_experts_that_are_hit():
    """Qwen3-30B-A3B: a token reads a tenth of the weights, 64 tokens nearly all of them."""
    shape = shape_of(SHAPES["qwen3-30b-a3b"], 2)
    expert = 48 * 3 * 2048 * 768
    assert shape.expert == expert and shape.body + 2 * shape.head == 30_532_122_624
    assert [round(shape.hit(n), 1) for n in (0, 1, 2, 16, 64)] == [0, 8, 15.5, 82.4, 125.9]
    one, many = (work_of(shape, [(1, 1)] * n, 0) for n in (1, 64))
    rest = shape.body - 128 * expert
    assert one.weight_bytes == 2 * (rest + 8 * expert + 2048)
    assert many.weight_bytes == 2 * (rest + round(shape.hit(64) * expert) + 64 * 2048)
    assert one.flops == 2 * (rest + 8 * expert) + one.attention_flops
    assert many.flops - many.attention_flops == 64 * (one.flops - one.attention_flops)
    assert shape.shard(2).expert == expert // 2


def machine(bandwidth: float, flops_rate: float) -> Hardware:
    return Hardware("a machine", bandwidth, flops_rate, 0)


def test_roofline():
    decode = Step([(1, 5), (1, 8)], 2, seconds=4.0, host_seconds=1.0)  # 656 bytes and 1184 FLOPs
    chunk = Step([(3, 5), (1, 8)], 1, seconds=5.0, host_seconds=0.0)
    assert (decode.kind, chunk.kind) == ("decode", "prefill")
    report = roofline(SHAPE, [decode, chunk, decode], machine(656, 1e9))
    assert report["decode"] == dict(
        steps=2, seconds=8, floor_seconds=2, floor_share=0.25, host_share=0.25
    )
    assert report["prefill"]["steps"] == 1 and report["prefill"]["host_share"] == 0
    bound_by_flops = roofline(SHAPE, [decode], machine(1e9, 592))
    assert bound_by_flops["decode"]["floor_seconds"] == 2
    assert bound_by_flops["prefill"] == dict(steps=0, seconds=0, floor_seconds=0)


@pytest.mark.parametrize("name", [*SHAPES, EMBEDDED_MODEL])
def test_parameters_are_counted_as_transformers_counts_them(name):
    is_file = name == EMBEDDED_MODEL
    config = AutoConfig.from_pretrained(name) if is_file else AutoConfig.for_model(**SHAPES[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    body = sum(
        p.numel()
        for n, p in model.named_parameters()
        if "embed_tokens" not in n and "lm_head" not in n
    )
    shape = shape_of(config.to_dict(), 2)
    assert shape.body == body and shape == shape_of(config, 2)
    assert shape.weight_bytes == 2 * sum(p.numel() for p in model.parameters())
