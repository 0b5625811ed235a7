"""The ladder: six engines on one small model, each with the answers of the engine, each a little longer than the one before.

Run: pytest tests/tutorials/test_ladder.py
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from nanovllm.config import EMBEDDED_MODEL
from tests.tools.extras import needs
from tutorials.ladder import rung4, rung5, rung6
from tutorials.ladder.__main__ import climb, main
from tutorials.ladder.qwen3 import Qwen3
from tutorials.ladder.runs import (
    Request,
    four_requests,
    many_requests,
    new_llm,
    run_engine,
    run_rung,
    seats,
)

FOLDER = Path(rung4.__file__).parent
RUNGS = [FOLDER / f"rung{number}.py" for number in range(1, 7)]


@pytest.fixture(scope="module")
def runs():
    llm = new_llm()
    return climb(four_requests(llm), llm)


def test_all_rungs_have_the_answers_of_the_engine(runs):
    answers = runs["LLM"].answers
    assert [len(ids) for ids in answers] == [6, 4, 3, 5]
    assert all(run.answers == answers for run in runs.values()) and len(runs) == 7


def test_what_each_rung_computes(runs):
    """18 answers' tokens of four prompts with 98 tokens."""
    tokens = {name: sum(step.tokens for step in run.steps) for name, run in runs.items()}
    assert tokens == {"rung 1": 429, "rung 3": 208} | dict.fromkeys(
        ["rung 2", "rung 4", "rung 5", "rung 6", "LLM"], 112
    )


def test_who_computes_how_much(runs):
    """Prompts of 18, 19, 47 and 14 tokens; rung 6 has a budget of 64."""
    first = {name: run.steps[0].sizes for name, run in runs.items()}
    assert first["rung 1"] == first["rung 2"] == [18]
    assert first["rung 3"] == [47] * 4
    assert first["rung 4"] == first["rung 5"] == first["LLM"] == [18, 19, 47, 14]
    assert first["rung 6"] == [18, 19, 27]
    for name in ("rung 2", "rung 4", "rung 5", "rung 6", "LLM"):
        tokens = Counter()
        for step in runs[name].steps:
            for request, size in zip(step.requests, step.sizes):
                tokens[len(request.prompt)] += size
        assert tokens == {18: 23, 19: 22, 47: 49, 14: 18}, name  # all but the last of an answer


def test_seats():
    """D takes the one that C leaves; in rung 3 it waits until all have ended."""
    needs("matplotlib")
    from tutorials.figures.plot_ladder import cells_of

    llm = new_llm()
    requests = four_requests(llm)
    with seats(3):
        runs = climb(requests, llm)
    assert rung4.SEATS == 8
    assert [len(runs[name].steps) for name in ("rung 3", "rung 4", "rung 6")] == [11, 8, 9]
    first = {
        name: next(
            (cell.row, cell.step) for cell in cells_of(run.steps, requests) if cell.name == "D"
        )
        for name, run in runs.items()
    }
    assert first["rung 3"] == (0, 6) and first["rung 4"] == (2, 3) and first["rung 6"] == (1, 4)


def test_the_command_draws(monkeypatch, tmp_path, capsys):
    needs("matplotlib")
    monkeypatch.setattr(sys, "argv", ["ladder", "--seats", "3", "--draw", str(tmp_path / "x.png")])
    main()
    assert "The answers are the same." in capsys.readouterr().out
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_recorded_tokens_are_those_of_this_code():
    recorded = recorded_runs()
    requests = many_requests()
    runs = {f"rung {n}": run_rung(n, Qwen3(EMBEDDED_MODEL), requests) for n in (4, 6)}
    runs["LLM"] = run_engine(new_llm(), requests)
    for name, run in runs.items():
        assert [step.tokens for step in run.steps] == recorded[name]


def recorded_runs() -> dict[str, list[int]]:
    """How many tokens each step computed, for 64 requests."""
    path = FOLDER.parent / "results" / "ladder_many.json"
    return json.loads(path.read_bytes())["runs"]


def test_the_chapter_prints_what_is_recorded():
    text = (FOLDER.parent / "01_ladder.md").read_text(encoding="utf-8")
    table = text[text.index("## What it costs") :]
    for name, steps in recorded_runs().items():
        (row,) = re.findall(rf"^{name} {{3,}}(.*)", table, re.MULTILINE)
        num_steps, num_tokens = row.split()[name != "LLM" :][:2]  # a rung also has lines
        assert (num_steps, num_tokens) == (f"{len(steps):,}", f"{sum(steps):,}"), name


@pytest.mark.parametrize("number", range(2, 7))
def test_a_rung_is_short(number):
    before, lines = (
        RUNGS[i].read_text(encoding="utf-8").splitlines() for i in (number - 2, number - 1)
    )
    assert len(lines) <= min(80, len(before) + 40)


@pytest.mark.parametrize("rung", [rung5, rung6])
def test_a_sequence_without_a_block_begins_again(rung, monkeypatch):
    """With blocks for 128 tokens, and 80 tokens that each of four sequences has in the end."""
    monkeypatch.setattr(rung, "NUM_BLOCKS", 8)
    requests = [Request([7 + i] * 40, 40) for i in range(4)]
    model = Qwen3(EMBEDDED_MODEL)
    run = run_rung(int(rung.__name__[-1]), model, requests)
    one_by_one = run_rung(2, model, requests)
    assert run.answers == one_by_one.answers
    assert sum(step.tokens for step in run.steps) > sum(step.tokens for step in one_by_one.steps)
