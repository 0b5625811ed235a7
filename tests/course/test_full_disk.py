"""A file that fills the disk costs its own points, and a page that cannot be written is a sentence.

Run: pytest tests/course/test_full_disk.py
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from submissions import FCFS, TASK, sentence

from tutorials.assignments import leaderboard, process
from tutorials.assignments.grader import Grader
from tutorials.assignments.report import Report
from tutorials.assignments.task import load_task

ROOT = Path(__file__).parents[2]
FILLS = "for i in range(99):\n    open(f'{FOLDER}/{i}', 'wb').write(b'x' * 2**20)\n"
IS_FULL = "OSError: [Errno 28] No space left on device (line 3 of your file"
GRADE = """
import sys
from pathlib import Path
from submissions import TASK
from tutorials.assignments.grade import grade_file
from tutorials.assignments.grader import Grader

for name in sys.argv[1:]:
    target = Path(name).with_suffix(".json")
    grade_file(Grader(TASK, [1]), Path(name), target)
"""


@pytest.fixture
def disk():
    """Where the small one will be."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield folder


def graded_on(disk: str, code: str) -> tuple[list[str], list[str], list[str]]:
    """This file, and then an honest one, graded without a box on a disk of 32 MiB: the sentences of both, what is said
    beside, and what lies there at last."""
    small = f"bwrap --dev-bind / / --cap-add ALL --perms 1777 --size {2**25} --tmpfs {disk} --"
    show = f"cd {disk} && cat one.json two.json && ls"
    grade = f"cd {ROOT} && PATH= {sys.executable} -c '{GRADE}' {disk}/one.py {disk}/two.py"
    write = f"cat > {disk}/one.py; printf {FCFS!r} > {disk}/two.py"
    result = subprocess.run(
        [*small.split(), "sh", "-c", f"{write}; {grade} >&2 && {show}"],
        input=code,
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": disk, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/tools"},
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    read = json.JSONDecoder().raw_decode
    one, end = read(result.stdout)
    two, end = read(result.stdout, end + 1)
    sentences = [check["output"] for results in (one, two) for check in results["tests"]]
    return sentences, result.stderr.splitlines(), result.stdout[end + 1 :].split()


@pytest.mark.parametrize("where", ("its own folder", "elsewhere"))
def test_without_a_box_the_disk_is_full(boxed, disk, where):
    """What lies in its own folder is removed with it. What lies elsewhere stays, and there may be no room to grade the
    next file: a sentence says so."""
    folder = "." if where == "its own folder" else disk
    sentences, said, left = graded_on(disk, f"FOLDER = {folder!r}\n{FILLS}{FCFS}")
    assert sentences[0].startswith(IS_FULL)
    assert f"{disk}/one.json was not written: No space left on device" in said
    if where == "its own folder":
        assert sentences[1].startswith("all kept")
        assert left == ["one.json", "one.py", "two.json", "two.py"]
    else:
        why = "No space left on device"
        assert sentences[1:] == [f"the grader has failed, tell your instructor: {why}"]
        assert f"{disk}/two.py was not graded to the end: {why}" in said


def test_in_a_box_it_fills_a_disk_of_its_own(boxed, graded):
    assert sentence(graded(f"FOLDER = '/tmp'\n{FILLS}{FCFS}")).startswith(IS_FULL)
    assert graded(FCFS)["score"] == 30


def test_a_library_that_cannot_be_copied_is_a_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "nanovllm").mkdir()
    (tmp_path / "nanovllm" / "gone.py").symlink_to("nowhere")
    (tmp_path / "x.py").write_text(FCFS)
    monkeypatch.setattr(process, "ROOT", tmp_path)
    (check,) = Grader(TASK, [1]).grade(tmp_path / "x.py").checks
    assert (check.score, check.max_score) == (0, TASK.points)
    assert check.output.startswith(
        "the grader has failed, tell your instructor: [Errno 2] No such file"
    )
    assert "x.py was not graded to the end: [Errno 2] No such" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    """The leaderboard's: half of it has room."""
    report = Report(values=dict.fromkeys(load_task("a7").goals, 0.5))
    page = tmp_path / "LEADERBOARD.md"
    page.write_text(leaderboard.new_page(load_task("a7"), {}))
    before = page.read_text()

    def write_text(path, text, **_):
        with path.open("w") as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(leaderboard, "PAGE", page)
    monkeypatch.setattr(Grader, "grade", lambda self, path: report)
    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(SystemExit, match=f"{page} was not written: No space left on device"):
        leaderboard.main([__file__, "--name", "Maya"])
    assert page.read_text() == before
    assert [*tmp_path.iterdir()] == [page]
