"""What a step takes on a machine, counted by hand; and what presets say of themselves.

Run: pytest tests/simulator/test_cost_of_machines.py
"""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from nanovllm.config import EMBEDDED_MODEL
from nanovllm.topics.simulator.cost_model import HARDWARE, Hardware, Shape, shape_of
from nanovllm.topics.simulator.machines import MACHINES, Machine
from nanovllm.topics.simulator.replica import model_config
from tutorials.simulation.studies import machines_in

ROOT = Path(__file__).parents[2]
EMBEDDED = shape_of(model_config(EMBEDDED_MODEL), itemsize=4)
SHAPE = Shape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, vocab=10, body=100, itemsize=2)
HARD = Hardware("a machine", 1000.0, 1000.0, 0)
NOTHING = dict(seconds_per_step=0.0, seconds_per_sequence=0.0, seconds_per_layer=0.0)
# at half of each ceiling
HALF = Machine(HARD, 0.5, 0.5, 0.5, 0.5, **NOTHING)
DECODE = [(1, 5), (1, 8)]
# 296 bytes of weights, 360 of keys and values; 560 FLOPs of products, 624 of attention
WEIGHTS, KEYS, PRODUCTS, SCORES = 296 / 500, 360 / 500, 560 / 500, 624 / 500


def seconds(machine, items=DECODE, num_sampled=2, num_copies=0, num_swaps=0):
    return machine.seconds(SHAPE, items, num_sampled, num_copies, num_swaps, block_size=4)


@pytest.mark.parametrize("overlap", [0.0, 0.25, 1.0])
def test_products_and_then_attention_each_with_an_overlap(overlap):
    machine = replace(HALF, overlap=overlap)
    products = PRODUCTS + (1 - overlap) * WEIGHTS
    attention = SCORES + (1 - overlap) * KEYS
    assert seconds(machine) == pytest.approx(products + attention)


def test_each_kind_of_work_has_its_own_rates():
    slow = replace(HALF, bandwidth_share=0.05)
    assert seconds(slow) == pytest.approx(10 * WEIGHTS + SCORES)
    slow = replace(HALF, attention_bandwidth_share=0.05)
    assert seconds(slow) == pytest.approx(PRODUCTS + 10 * KEYS)
    slow = replace(HALF, flops_share=0.05)
    assert seconds(slow) == pytest.approx(10 * PRODUCTS + SCORES)
    slow = replace(HALF, attention_flops_share=0.05)
    assert seconds(slow) == pytest.approx(PRODUCTS + 10 * SCORES)


def test_what_stands_beside_the_kernels():
    base = seconds(HALF)
    host = replace(HALF, seconds_per_step=1.0, seconds_per_sequence=0.25, seconds_per_token=0.125)
    assert seconds(host) - base == pytest.approx(1.0 + 2 * 0.25 + 2 * 0.125)
    items = [(3, 5), (1, 8)]
    launches = replace(HALF, seconds_per_layer=0.5, seconds_per_chunk=0.25)
    assert seconds(launches) - base == pytest.approx(2 * 0.5)
    more = seconds(launches, items, 1) - seconds(HALF, items, 1)
    assert more == pytest.approx(2 * (0.5 + 0.25))
    block = 4 * SHAPE.kv_bytes
    assert seconds(HALF, num_copies=3) - base == pytest.approx(2 * 3 * block / 500)
    swaps = replace(HALF, host_bytes_per_second=96.0)
    assert seconds(swaps, num_swaps=5) - base == pytest.approx(5 * block / 96)


def test_a_machine_that_is_slower_in_all():
    twice = HALF.slower(2).slower(1.5)
    args = ([(3, 5), (1, 8)], 1, 2, 3)
    assert seconds(twice, *args) == pytest.approx(3 * seconds(HALF, *args))


def test_presets_say_where_their_numbers_come_from():
    assert MACHINES.keys() == {*HARDWARE, "cpu"}
    names = {field.name for field in fields(Machine)}
    for name, machine in MACHINES.items():
        assert machine.sources.keys() <= names
        assert machine.sources["hardware"] and 0 <= machine.overlap <= 1
        if name != "cpu":
            assert machine.hardware == HARDWARE[name]
            assert {"overlap", "flops_share"}.isdisjoint(machine.sources), (
                "it has not been measured"
            )


def test_the_cpu_is_the_one_that_was_measured():
    measured = machines_in(ROOT / "tutorials/results/machines_cpu.json")["float32, 1 thread"]
    for name in ("overlap", "seconds_per_layer", "seconds_per_token"):
        assert getattr(MACHINES["cpu"], name) == getattr(measured, name)
    for step in (([(1, 100)], 1), ([(1, 500)] * 40, 40), ([(700, 700), (1, 50)], 2)):
        own, theirs = (
            machine.seconds(EMBEDDED, *step, num_copies=0, num_swaps=3, block_size=16)
            for machine in (MACHINES["cpu"], measured)
        )
        assert own == pytest.approx(theirs, rel=0.01)
