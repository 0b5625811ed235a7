"""nanovllm first-light runs without a GPU, so that no typo waits for the first minutes on one.

Run: pytest tests/first_light/test_first_light.py --slow
"""

import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM
from nanovllm.topics.first_light import command as first_light
from tutorials import machine

PROBLEM = machine.interpreter_problem()


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="it needs Triton")
@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
@pytest.mark.parametrize(
    "part, shape", [("machine", "dense"), ("speed", "moe"), ("speed", "hybrid")]
)  # for the others: test_check_kernels.py
def test_a_part_works_in_the_interpreter(part, shape, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    *_, facts = first_light.part_in_process(part, True, shape)
    assert "error" not in facts, facts
    assert part != "speed" or 0 < facts["2 sequences"]["share_of_roofline"] < 1


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_and_time_are_those_of_the_same_step(overlap, monkeypatch):
    """And of a step of all sequences, although the prompts do not fit into one step."""
    clock = iter([0, 5, 10, 11, 20, 24, 30, 32, 40, 43])  # the steps take 5, 1, 4, 2 and 3 seconds
    monkeypatch.setattr(first_light, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    options = {"attention_backend": "torch", "num_blocks": 20, "max_num_batched_tokens": 12}
    with LLM(device="cpu", max_model_len=64, **options) as llm:
        for batch in (1, 5, 3):  # at last, two are aborted
            first_light.run_only(llm, batch, 8)
        schedules = []
        llm.observers.append(lambda schedule, _: schedules.append(schedule))
        seconds, num_tokens = first_light.median_step(llm, 5, overlap)
    assert [len(schedule.items) for schedule in schedules] == [3] * 5
    assert seconds == 3 and num_tokens == sum(start + 2 for _, start, _ in schedules[-1].items)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and --gpu")
@pytest.mark.parametrize("name", first_light.PARTS)
def test_a_part_works_on_a_gpu(name):
    """With --gpu, or under scripts/without_gpu."""
    part = first_light.PARTS[name]
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 64}  # a simulated GPU takes long
    facts = part.function(part.options | few, name == "speed")
    assert "error" not in facts, facts


def test_a_part_that_fails_is_told_with_what_it_most_likely_is(tmp_path, monkeypatch, capsys):
    """The others run. A wrong answer is a failure, and so is the end of a process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    results = {"torch": {"error": "wrong answers"}, "triton": {"error": "exit status -11"}}
    monkeypatch.setattr(first_light, "part_in_process", lambda name, *_: [results.get(name, {})])
    file = tmp_path / "light.json"
    with pytest.raises(SystemExit) as ended:
        first_light.run(first_light.Namespace(file=file, small=False, shape="dense"))
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and lines[1].startswith("torch    failed: ")
    assert "attention_backend='torch'" in lines[4] and json.loads(file.read_bytes())["speed"] == {}


def test_without_a_gpu_nothing_is_tried_and_nothing_written(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU here: nothing to try"):
        first_light.run(first_light.Namespace(file=tmp_path / "light.json", small=False))
    assert [*tmp_path.iterdir()] == []


def test_a_process_that_fails():
    (facts,) = first_light.part_in_process("no such part", False)
    assert facts["error"] == "exit status 1: KeyError: 'no such part'"


def test_a_part_that_is_ended_keeps_what_it_has_found(monkeypatch, tmp_path):
    """A line of JSON for each batch. Other lines are not read."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho hello\necho '{\"1 sequences\": 1}'\nexec sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setattr(first_light.sys, "executable", str(program))
    monkeypatch.setattr(first_light, "SECONDS", 0.3)
    first, last = first_light.part_in_process("speed", False)
    assert first == {"1 sequences": 1} and last.items() > first.items()
    assert last["error"].startswith("exit status -9: ended after 0 s")


def test_wrong_answers_are_an_error(monkeypatch):
    """All others are right."""
    monkeypatch.setitem(first_light.ANSWERS, "what is 347 + 285?", "347 + 285 = 633")
    result = first_light.answers({"attention_backend": "torch", "num_blocks": 99}, True)
    assert result["error"] == "wrong answers: {'what is 347 + 285?': '347 + 285 = 632'}"
