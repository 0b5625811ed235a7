"""Find it: each case can be laid out, found by a lecturer's test, and told from other faults of its function.

Run: pytest tests/tutorials/test_find.py
"""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from book import BLOCK, ROOT, TUTORIALS, pattern

from example import QUESTIONS
from nanovllm import LLM, SamplingParams
from tutorials import find
from tutorials.building.holes import functions
from tutorials.finding.cases import NUMBERS, case_of

PAGE = TUTORIALS / "finding" / "README.md"
EXAMPLE = """
def test_the_example():
    from example import QUESTIONS
    from nanovllm import LLM, SamplingParams

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = LLM().chat(chats, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == EXPECTED
"""


RUNNER = """
import os, signal, sys
sys.path.remove("")
sys.modules["numba"] = None
import torch, transformers.models.qwen3
for folder, source in JOBS:
    if os.fork() == 0:
        sys.path.insert(0, folder)
        os.chdir(folder)
        signal.alarm(200)
        names = {}
        exec(source, names)
        [test() for name, test in names.items() if name.startswith("test_")]
        sys.exit()
    print("passes:", os.wait()[1] == 0, flush=True)
"""


def printed_by(code: str, folder) -> str:
    env = os.environ | {"PYTHONPATH": f"{folder}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture(scope="module")
def passes(tmp_path_factory) -> dict[tuple, bool]:
    """By case, number of the fault (0: none) and test. Each runs in a process that is forked off, without numba."""
    place = tmp_path_factory.mktemp("engines")
    shutil.copytree(find.PACKAGE, place / "ours" / "nanovllm", ignore=find.NOT_COPIED)
    shutil.copy(ROOT / "example.py", place / "ours")
    llm = LLM(attention_backend="torch", device="cpu")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    example = EXAMPLE.replace("EXPECTED", repr([output.outputs[0].text for output in outputs]))
    jobs = {}
    for case in map(case_of, NUMBERS):
        for i, fault in enumerate([None, *case.faults[:2]]):
            folder = place / f"{case.number} {i}"
            shutil.copytree(place / "ours", folder, copy_function=os.link)
            (folder / "nanovllm" / case.module).unlink()  # it is a link
            find.put(folder, case, fault)
            jobs[case.number, i, "test"] = f"{folder}", case.test
        jobs[case.number, 1, "example"] = f"{place / f'{case.number} 1'}", example
    printed = printed_by(RUNNER.replace("JOBS", repr([*jobs.values()])), place)
    said = re.findall(r"^passes: (\w+)$", printed, re.MULTILINE)
    return {key: one == "True" for key, one in zip(jobs, said, strict=True)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("number", NUMBERS)
def test_a_lecturers_test_finds_the_fault_and_the_example_still_runs(number, passes):
    assert passes[number, 0, "test"], "the right engine"
    assert not passes[number, 1, "test"], "the fault"
    assert not passes[number, 2, "test"], "another fault of the function"
    assert passes[number, 1, "example"], "README's example with the fault"


@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_laid_out(number, tmp_path, capsys):
    """One function differs, and nothing else, not even a date. The report does not name its place."""
    folder = tmp_path / "mine"
    assert find.main(["new", f"{folder}", f"{number}"]) == 0
    case = case_of(number)
    assert not re.search(rf"\b({case.function.split('.')[-1]}|{case.module})\b", case.report)
    changed = folder / "nanovllm" / case.module
    for path in find.PACKAGE.rglob("*.py"):
        copy = folder / "nanovllm" / path.relative_to(find.PACKAGE)
        assert copy.stat().st_mtime == path.stat().st_mtime
        assert (copy == changed) == (copy.read_bytes() != path.read_bytes())
    ours = (find.PACKAGE / case.module).read_text(encoding="utf-8")
    assert len(case.faults) == 4 and len(case.hints) == 3
    for fault in case.faults:
        source = case.source(find.PACKAGE, fault)
        known, others = functions(ours), functions(source)
        differing = [name for name in known if ast.dump(known[name]) != ast.dump(others[name])]
        assert differing == [case.function]
    assert all((ROOT / test.partition("::")[0]).is_file() for test in case.tests)
    for i in range(3):
        assert find.main(["hint", f"{folder}"]) == 0
        assert case.hints[i] in capsys.readouterr().out
    assert find.hint(folder).startswith("there are no more hints: all 3")
    assert find.main(["check", f"{folder}"]) == 1
    assert "write a test that fails" in capsys.readouterr().out


@pytest.mark.slow
def test_check_of_a_right_answer_and_of_wrong_ones(tmp_path):
    folder, case = tmp_path / "mine", case_of(7)
    find.new(folder, case)
    for test, says in (
        ("def test_it(:\n", "your test does not run"),
        ("def test_it():\n    assert True\n", "fault, your test passes: it must fail"),
        ("def test_it():\n    assert False\n", "right engine, your test fails: it must pass"),
        (case.test, "on your engine, your test fails: the fault is still there"),
    ):
        (folder / find.TEST).write_text(test, encoding="utf-8")
        with pytest.raises(find.Wrong, match=says):
            list(find.check(folder))
    find.put(folder, case, None)
    lines = list(find.check(folder))
    assert lines[2] == "your test also finds 3 of 3 other faults of this function"
    assert re.search(r"module: (\d+) of \1 pass on your engine$", lines[-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page shows what a CPU prints")
def test_the_page_prints_what_it_says(tmp_path):
    """In the folder of case 0."""
    find.new(tmp_path / "mine", case_of(0))
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    code = "\nprint('=====')\n".join(block for block, _ in blocks)
    printed = printed_by(code, tmp_path / "mine").split("=====\n")
    assert len(printed) == len(blocks) > 5
    for said, (_, expected) in zip(printed, blocks, strict=True):
        assert re.fullmatch(pattern(expected), said.rstrip()), f"{said}\nthe page:\n{expected}"
