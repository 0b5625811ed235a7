"""What is said of other machines: a part of it is computed again.

Run: pytest tests/course/test_sensitivity.py [--slow]
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from measure.sensitivity import (
    assignment_on,
    changed,
    on_machine,
    seconds_at_once,
    study_on,
    table,
    variants,
    verdict,
)
from nanovllm.simulator.machines import MACHINES
from tutorials.assignments.task import NAMES, load_task
from tutorials.simulation.studies import STUDIES

ROOT = Path(__file__).parents[2]
DEPENDS = "bound for prompts: shorter latency"


@cache
def report() -> dict:
    return json.loads((ROOT / "tutorials/results/sensitivity.json").read_bytes())


def test_the_variants():
    found = variants()
    assert len(found) == 12 and {overlap for overlap, _, _ in found.values()} == {0.0, 0.5, 1.0}
    machine = changed("h100", 0.5, 3e-3, 0.3)
    assert machine.overlap == 0.5 and machine.seconds_per_step == 3e-3
    assert machine.flops_share == machine.attention_flops_share == 0.3
    assert replace(machine, overlap=1.0).hardware == MACHINES["h100"].hardware


def test_studies_are_all_in_the_file():
    studies = report()["studies"]
    assert {*studies} == {study.name for study in STUDIES}
    assert all(rows.keys() == variants().keys() for rows in studies.values())
    depends = [name for name, rows in studies.items() if verdict(rows) != "holds under all"]
    assert depends == [DEPENDS]


def test_no_assignment_depends_on_the_machine():
    assignments = report()["assignments"]
    assert [*assignments] == [name for name in NAMES if name != "template"]
    for name, rows in assignments.items():
        assert rows.keys() == variants().keys()
        assert verdict(rows) == "holds under all", name


@pytest.mark.slow(but_every=8)
@pytest.mark.parametrize("study", STUDIES[::4], ids=lambda study: study.name)
def test_a_study_is_measured_again(study):
    rows = report()["studies"][study.name]
    name, variant = [*variants().items()][len(study.name) % len(rows)]
    assert study_on(study.name, variant) == pytest.approx(rows[name])


def test_a_machine_for_an_assignment_is_as_fast_as_the_usual_one():
    task = load_task("a2")
    (part,) = task.parts
    (other,) = on_machine(task, (0.0, 3e-3, 0.3)).parts
    assert other.hardware.overlap == 0
    usual = seconds_at_once(part, "h100")
    assert seconds_at_once(other, other.hardware) == pytest.approx(usual)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a3"])
def test_an_assignment_is_measured_again(name):
    rows = report()["assignments"][name]
    variant_name, variant = [*variants().items()][int(name[1:])]
    again = assignment_on(name, [1], variant)
    assert again["solution"] >= rows[variant_name]["solution"] - 1e-9  # the worst of more seeds
    assert again["silly"] <= rows[variant_name]["silly"] + 1e-9


def test_what_is_said():
    holds = {"one": 1.0, "other": 2.0, "holds": True}
    fails = {"one": 3.0, "other": 2.0, "holds": False}
    assert verdict({"a": holds, "b": holds}) == "holds under all"
    assert verdict({"a": holds, "b": fails}).startswith("depends on the machine: not with 1 of 2")
    points = {"solution": 0.95, "silly": 0.2, "by": "last first", "holds": True}
    text = table({"studies": {"s": {"a": holds, "b": fails}}, "assignments": {"a1": {"a": points}}})
    assert "0.50 to 1.50" in text and "| a1 | 95% | 20% (last first) | holds under all |" in text
