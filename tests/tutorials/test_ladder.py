"""The ladder: six engines on one small model, each with the answers of the engine, each a little longer than the one before.

Run: pytest tests/tutorials/test_ladder.py
"""

from pathlib import Path

import pytest

from tutorials.ladder import rung4, rung5, rung6
from tutorials.ladder.__main__ import Request, climb, four_requests, new_llm

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


@pytest.mark.parametrize("number", range(2, 7))
def test_a_rung_is_short(number):
    before, lines = (RUNGS[i].read_text().splitlines() for i in (number - 2, number - 1))
    assert len(lines) <= min(80, len(before) + 40)


@pytest.mark.parametrize("rung", [rung5, rung6])
def test_a_sequence_without_a_block_begins_again(rung, monkeypatch):
    """With blocks for 128 tokens, and 80 tokens that each of four sequences has in the end."""
    monkeypatch.setattr(rung, "NUM_BLOCKS", 8)
    llm = new_llm()
    requests = [Request([7 + i] * 40, 40) for i in range(4)]
    runs = climb(requests, llm)
    name = f"rung {rung.__name__[-1]}"
    assert runs[name].answers == runs["LLM"].answers
    assert sum(step.tokens for step in runs[name].steps) > sum(
        step.tokens for step in runs["rung 2"].steps
    )
