"""The ladder: seven engines on one small model, each with the answers of the engine.

Run: pytest tests/tutorials/test_ladder.py
"""

import ast
import json
import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
from book import check_picture
from sizes import size_of

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL
from tutorials.ladder import rung4, rung5, rung6, rung7
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
from tutorials.play import play
from tutorials.play import tokens as num_tokens

FOLDER = Path(rung4.__file__).parent
RUNGS = [FOLDER / f"rung{number}.py" for number in range(1, 7)]


@pytest.fixture(scope="module")
def runs():
    llm = new_llm()
    return climb(four_requests(llm), llm)


def test_all_rungs_have_the_answers_of_the_engine(runs):
    answers = runs["LLM"].answers
    assert [len(ids) for ids in answers] == [6, 4, 3, 5]
    assert all(run.answers == answers for run in runs.values()) and len(runs) == 8


def test_what_each_rung_computes(runs):
    """18 answers' tokens of four prompts with 98 tokens."""
    tokens = {name: sum(step.tokens for step in run.steps) for name, run in runs.items()}
    assert tokens == {"rung 1": 429, "rung 3": 208} | dict.fromkeys(
        ["rung 2", "rung 4", "rung 5", "rung 6", "rung 7", "LLM"], 112
    )
    assert runs["rung 7"].steps == runs["LLM"].steps


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


# --- the pictures of chapter 03 ---


def test_three_ways_to_batch():
    """Rung 3 has two seats, and C comes when A and B run; the scheduler is that of the engine."""
    requests = [Request([7] * 6, 6), Request([8] * 20, 4), Request([9] * 5, 4)]
    with seats(2):
        steps = run_rung(3, Qwen3(EMBEDDED_MODEL), requests).steps
    jobs = [("A", 0, 6, 6), ("B", 0, 20, 4), ("C", 2, 5, 4)]
    runs = {
        "static (rung 3)": [step.tokens for step in steps],
        "continuous, whole prompts (as rung 4)": [*map(num_tokens, play(jobs, budget=1000))],
        "continuous, in chunks, with a budget of 8 tokens": [
            *map(num_tokens, play(jobs, budget=8))
        ],
    }
    for name, tokens in runs.items():
        title = f"{name}: {len(tokens)} steps, at most {max(tokens)} tokens in one"
        check_picture("scheduler_batching", title)


def test_tokens_of_each_step():
    runs = recorded_runs()
    for name in ("rung 4", "rung 6"):
        tokens = runs[name]
        check_picture(
            "scheduler_tokens", f"{name}: {len(tokens)} steps, {sum(tokens):,} tokens computed"
        )
    most = max(runs["rung 4"])
    step = runs["rung 4"].index(most) + 1
    said = f"step {step}: {most} tokens, 513 of them one prompt;\nseven answers wait for it"
    check_picture("scheduler_tokens", said)
    assert most == 513 + 7 and max(runs["rung 6"]) == 64


def test_the_command_prints_a_table(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ladder", "--seats", "3"])
    main()
    assert "The answers are the same." in capsys.readouterr().out


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


# --- rung 7 ---


@pytest.mark.parametrize("num_blocks, budget, num_seqs", [(64, 384, 8), (24, 48, 6), (16, 64, 8)])
def test_rung_7_takes_each_step_as_the_engine(num_blocks, budget, num_seqs):
    """The same tokens, greedy and drawn, in the same blocks: with shared prefixes and preemptions."""
    rng = random.Random(0)
    shared = [rng.randrange(1500) for _ in range(70)]
    prompts = [
        shared[: rng.choice([0, 20, 40, 70])] + rng.choices(range(1500), k=rng.randint(1, 60))
        for _ in range(20)
    ]
    params = [
        {"temperature": 0.4 * (i % 3), "seed": i, "max_tokens": 2 * i, "ignore_eos": i % 2 == 0}
        for i in range(1, 21)
    ]
    options = {"num_blocks": num_blocks, "max_num_seqs": num_seqs}
    options["max_num_batched_tokens"] = budget
    llm = LLM(dtype="float32", device="cpu", **options)
    page = rung7.LLM(EMBEDDED_MODEL, **options)
    found, steps = [], []
    for engine, kind in ((llm, SamplingParams), (page, rung7.SamplingParams)):
        steps.append([])
        with patch.object(engine.runner, "launch", noting(engine.runner.launch, steps[-1])):
            outputs = engine.generate(prompts, [kind(**one) for one in params])
        outputs = [getattr(output, "outputs", [output])[0] for output in outputs]
        found.append([(one.text, one.token_ids, one.finish_reason) for one in outputs])
    assert found[0] == found[1] and {reason for *_, reason in found[0]} == {"stop", "length"}
    assert steps[0] == steps[1]
    assert llm.stats()["prefix_cache_hit_tokens"] > 0
    assert (llm.stats()["preemptions"] > 0) == (num_blocks < 64)


def noting(launch, steps: list):
    def noted(schedule):
        items = schedule.items
        steps.append([(len(seq.token_ids), *rest, [*seq.block_table]) for seq, *rest in items])
        return launch(schedule)

    return noted


def test_rung_7_takes_a_single_end_token_and_refuses_a_request_without_an_answer(tmp_path):
    shutil.copytree(EMBEDDED_MODEL, tmp_path, dirs_exist_ok=True)
    page = rung7.LLM(EMBEDDED_MODEL)
    params = rung7.SamplingParams(temperature=0)
    (answer,) = page.generate(["Once upon a time"], [params])
    settings = {"eos_token_id": answer.token_ids[4]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    (cut,) = rung7.LLM(tmp_path).generate(["Once upon a time"], [params])
    end = answer.token_ids.index(answer.token_ids[4]) + 1
    assert (cut.token_ids, cut.finish_reason) == (answer.token_ids[:end], "stop")
    for size, max_tokens in ((2048, 1), (5, 0), (0, 5)):
        with pytest.raises(AssertionError, match="prompt"):
            page.add_request([7] * size, rung7.SamplingParams(max_tokens=max_tokens))


def test_rung_7_is_a_page_with_the_names_of_the_engine():
    source = Path(rung7.__file__).read_text(encoding="utf-8")
    assert size_of(source).lines <= 300
    assert not re.search(r"^(import|from) (nanovllm|tutorials)", source, re.MULTILINE)
    theirs = {
        name for path in Path(nanovllm.__file__).parent.rglob("*.py") for name in names_in(path)
    }
    assert names_in(Path(rung7.__file__)) - theirs == {"linear", "norm", "rotate", "lm_head"}


def names_in(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
