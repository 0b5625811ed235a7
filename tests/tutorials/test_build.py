"""Build it: holes are complete, the engine's tests accept right bodies, refuse wrong ones, and say why in a sentence.

Run: pytest tests/tutorials/test_build.py; with --slow a part of wrong_answers/bodies.txt, with ALL_BODIES=1 as well all
"""

import compileall
import os
import re
import shutil
import subprocess
import sys

import pytest
from book import ROOT, TUTORIALS
from wrong_answers.bodies import wrong_bodies

from tutorials import build
from tutorials.building.holes import open_holes, with_holes
from tutorials.building.milestones import MILESTONES, title_of

BLOCKS = MILESTONES[0]
PARTS = 30  # of the wrong bodies: all together take some 15 minutes


def source_of(module: str) -> str:
    return (build.PACKAGE / module).read_text(encoding="utf-8")


@pytest.mark.parametrize("milestone", MILESTONES[:-1], ids=lambda milestone: milestone.name)
def test_new_takes_the_bodies_and_nothing_else(milestone, tmp_path):
    assert build.main(["new", f"{tmp_path / 'mine'}", "--only", f"{milestone.number}"]) == 0
    package = tmp_path / "mine" / "nanovllm"
    for path in package.rglob("*.py"):
        module = path.relative_to(package).as_posix()
        source = path.read_text(encoding="utf-8")
        if module not in milestone.holes:
            assert source == source_of(module)
            continue
        lines = iter(source_of(module).splitlines())
        assert all(line in lines for line in source.splitlines() if milestone.message not in line)
        assert sorted(open_holes(source)) == sorted(milestone.holes[module])
        assert not re.search(rf"^ *#.*\n *raise .*{milestone.message}", source, re.MULTILINE)


def test_the_table():
    """A function has one milestone; sections and tests are there, and chapters name the command."""
    holes = [
        (module, name) for one in MILESTONES for module in one.holes for name in one.holes[module]
    ]
    assert len({*holes}) == len(holes)
    for milestone in MILESTONES:
        (chapter,) = TUTORIALS.glob(f"{milestone.chapter}_*.md")
        command = f"tutorials.build check my_engine {milestone.number}`"
        assert command in chapter.read_text(encoding="utf-8")
        for group in milestone.groups:
            page, _, anchor = group.section.partition("#")
            text = re.sub(r"[^\w\n# -]", "", (TUTORIALS / page).read_text(encoding="utf-8").lower())
            assert f"\n##-{anchor}\n" in text.replace(" ", "-"), group.section
            tests = (ROOT / group.file).read_text(encoding="utf-8")
            assert all(f" {test}(" in tests for test in group.tests), group.tests


def test_an_open_hole_is_named(tmp_path, capsys):
    """In a folder in which all other milestones are open, or broken. One of them is in the same file."""
    build.new(tmp_path / "mine")
    blocks = tmp_path / "mine" / "nanovllm" / "block_manager.py"
    source = with_holes(source_of(blocks.name), ["BlockManager.free"], BLOCKS.message)
    blocks.write_text(with_holes(source, ["BlockManager.fork"], MILESTONES[7].message))
    blocks.with_name("scheduler.py").write_text("x = (")
    result = build.check(tmp_path / "mine", BLOCKS)
    assert result.lines() == [
        "milestone 1, blocks: 48 of 60 tests pass",
        "still open: BlockManager.free in block_manager.py",
        "first: blocks come on demand: BlockManager.free is still open (milestone 1, chapter 02)",
        "read: tutorials/02_blocks.md#one-sequence-by-hand",
        "these fail, too: looking a prefix up takes nothing; writing into a full block that was "
        "forked in its middle; freed blocks are a cache until they are handed out; a block with "
        "nothing to find is reused before any cached one; least recently used goes first; and 5 more",
    ]
    scores = [test["score"] for test in result.points().results()["tests"]]
    assert scores == [0, 9.79, 6.67, 0, 0, 0]
    assert build.advice(tmp_path / "mine")[0] == "done: nothing yet"
    blocks.write_text("x = 1\ny = (\n")
    assert build.main(["check", f"{tmp_path / 'mine'}", "1"]) == 1
    assert "does not load: block_manager.py, line 2: SyntaxError" in capsys.readouterr().out


FORGED = """
import sys
place = sys._getframe()
while "job" not in place.f_locals:
    place = place.f_back
open(place.f_locals["job"]["report"], "a").write('{"collected": ["a"]}\\n{"passed": "a"}\\n{"ended": true}\\n')
import os
os._exit(0)
"""


@pytest.mark.slow(but_every=3)
@pytest.mark.parametrize(
    "old, new, says",
    [
        ("self.blocks[block_id].ref_count += 1", 'import pytest; pytest.skip("later")', "your code skips the test"),
        ("block.ref_count = 1\n        return", "import os; os._exit(0)\n        return", "your code has ended Python"),
        ("EMPTY_PREFIX = 0\n", f"EMPTY_PREFIX = 0\n{FORGED}", "your code has ended Python"),
    ],
)  # fmt: skip
def test_no_test_is_passed_by_leaving(old, new, says, tmp_path):
    build.new(tmp_path / "mine")
    source = source_of("block_manager.py")
    assert source.count(old) == 1
    path = tmp_path / "mine" / "nanovllm" / "block_manager.py"
    path.write_text(source.replace(old, new))
    result = build.check(tmp_path / "mine", BLOCKS)
    assert not result.is_right and says in result.first_problem()[0]


def test_a_file_of_another_milestone_is_named(tmp_path):
    """Its fault is in the scheduler, and the tests of blocks find it."""
    build.new(tmp_path / "mine")
    for module, old, new in (
        ("scheduler.py", "self.running.sort(key=self.running_order)", "self.running.pop(0)"),
        ("block_manager.py", "", ""),
    ):
        path = tmp_path / "mine" / "nanovllm" / module
        path.write_text(f"{source_of(module).replace(old, new) if old else source_of(module)}\n")
    lines = build.check(tmp_path / "mine", BLOCKS).lines()
    assert lines[1] == "with your scheduler.py"
    assert "with our scheduler.py this test passes: look there" in lines


def test_right_bodies_have_their_gain_and_are_noted(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "mine"
    build.new(folder)
    path = folder / "nanovllm" / "block_manager.py"
    ours = source_of(path.name)
    path.write_text(with_holes(f"{ours}\n", ["BlockManager.fork"], MILESTONES[7].message))
    assert build.main(["check", f"{folder}", "1"]) == 0
    assert "guess the number" in capsys.readouterr().out
    monkeypatch.delattr(build, "check")  # the guess needs no second check
    assert build.main(["check", f"{folder}", "1", "--guess", "18"]) == 0
    assert "12 blocks; your guess was 18, 1.5 times that" in capsys.readouterr().out
    path.write_text(ours)
    assert build.kept(folder, BLOCKS) is None
    done, following, *_ = build.advice(folder)
    assert done == "done: 1 blocks" and following.startswith("next: 2 scheduler")
    assert build.advice(folder, 7)[1].startswith("next: 7 engine")
    build.new(tmp_path / "one", only=7)
    assert build.advice(tmp_path / "one")[1].startswith("next: 7 engine")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("part", range(PARTS) if "ALL_BODIES" in os.environ else [0])
def test_wrong_bodies_are_refused_and_right_ones_pass(tmp_path, part):
    """A wrong one by the test that its sentence names. numba's kernels run as plain Python."""
    bodies = [body for body in wrong_bodies() if not body.says.startswith("all pass:")]
    jobs, answers = [], bodies[part::PARTS]
    build.assemble(ROOT, BLOCKS, tmp_path / "whole")
    compileall.compile_dir(tmp_path / "whole", quiet=1)
    for i, answer in enumerate(answers):
        milestone, place = MILESTONES[answer.milestone - 1], tmp_path / str(i)
        shutil.copytree(tmp_path / "whole", place, copy_function=os.link)
        changed = answer.changed({module: source_of(module) for module in milestone.holes})
        for module, source in changed.items():
            (place / "nanovllm" / module).unlink()  # it is a link
            (place / "nanovllm" / module).write_text(source, encoding="utf-8")
        named = re.split(r": | \\", answer.says)[0]
        decisive = [test for test in milestone.tests if re.search(named, title_of(test))]
        job = build.job_of(milestone, place, place / "report")
        jobs.append(job | {"tests": decisive or milestone.tests, "measures": False, "limit": 15})
    code = f"from tutorials.building.run import run_each; run_each({jobs})"
    env = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True)
    for answer, job in zip(answers, jobs):
        result = build.result_of(MILESTONES[answer.milestone - 1], [], job, "")
        says = "all pass" if result.is_right else result.first_problem()[0]
        assert re.search(answer.says, says), (answer, says)
