"""The guide's commands make a new assignment out of the template, and its tests pass.

Run: pytest tests/course/test_new_assignment.py --slow
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = "tutorials/results/assignments"
COPIED = ("nanovllm", "tutorials", "tests", "conftest.py", "pyproject.toml", "README.md")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the commands are for a Unix shell")
def test_the_commands_of_the_guide_make_a_new_assignment(tmp_path):
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "node_modules")
            shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path)}
    environ.pop("SOLUTION", None)
    guide = (ROOT / "tutorials" / "assignments" / "README.md").read_text(encoding="utf-8")
    section = guide.partition("\n## A new assignment\n")[2].partition("\n## ")[0]
    making, measuring = re.findall(r"^```bash\n(.*?)^```\n", section, re.MULTILINE | re.DOTALL)
    # measured is one seed of 20; the template's numbers are also those of its copy
    measure, written = re.match(
        r"(python -m tutorials.assignments.seeds a10 .* --json (\S+))\n", measuring
    ).groups()
    stored = json.loads(
        (ROOT / RESULTS / "template.json").read_text(encoding="utf-8").replace("template", "a10")
    )
    for block in (making, f"{measure} --count 1", measuring.removeprefix(measure)):
        command = ["bash", "-ec", block]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        if "--count" in block:
            measured = json.loads((tmp_path / written).read_bytes())
            assert measured["rows"] == {name: rows[:1] for name, rows in stored["rows"].items()}
            (tmp_path / written).write_text(json.dumps(stored))
    passed = re.findall(r"^(\d+) passed(?!.*(?:failed|skipped))", done.stdout, re.MULTILINE)
    assert len(passed) == 2 and min(map(int, passed)) >= 5, done.stdout
    folder = tmp_path / "tutorials" / "assignments" / "a10"
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    assert names == ["README.md", "starter.py", "task.py", "test_a10.py"]
    handout = (folder / "README.md").read_text(encoding="utf-8")
    assert "template" not in handout and "| a10_solution |" in handout
