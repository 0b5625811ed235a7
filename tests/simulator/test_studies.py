"""What the chapters say of machines that nobody has measured: a part of it is computed again.

Run: pytest tests/simulator/test_studies.py [--slow]
"""

import json
from functools import cache
from pathlib import Path

import pytest

from tutorials.simulation.studies import STUDIES, study_on, variants

ROOT = Path(__file__).parents[2]
DEPENDS = "bound for prompts: shorter latency"


@cache
def studies() -> dict:
    return json.loads((ROOT / "tutorials/results/sensitivity.json").read_bytes())["studies"]


def test_one_study_depends_on_the_machine():
    assert {*studies()} == {study.name for study in STUDIES}
    assert all(rows.keys() == variants().keys() for rows in studies().values())
    depends = [
        name for name, rows in studies().items() if not all(r["holds"] for r in rows.values())
    ]
    assert depends == [DEPENDS]


@pytest.mark.slow(but_every=8)
@pytest.mark.parametrize("study", STUDIES[::4], ids=lambda study: study.name)
def test_a_study_has_the_recorded_numbers(study):
    rows = studies()[study.name]
    name, variant = [*variants().items()][len(study.name) % len(rows)]
    assert study_on(study.name, variant) == pytest.approx(rows[name])
