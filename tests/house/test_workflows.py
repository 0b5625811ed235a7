"""The forge's workflows, and the script for a GPU, run what is there. They cannot run here.

Run: pytest tests/house/test_workflows.py
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import bench

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_is_run_is_there(path):
    text = path.read_text(encoding="utf-8")
    extras = re.findall(r"\[(\w+)\]\"", text)
    assert extras
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in extras)
    for script in re.findall(r"run: (scripts/\w+)", text):
        assert (ROOT / script).exists()
    for module in re.findall(r"python -m (tutorials[.\w]*)", text):
        assert (ROOT / module.replace(".", "/")).exists()


def test_what_is_run_on_a_gpu_is_there():
    """Each part is one of those that run without names, and its files and modules exist."""
    text = (ROOT / "scripts" / "on_a_gpu").read_text(encoding="utf-8")
    (named,) = re.findall(r"\|\| parts=\((.*)\)", text)
    assert sorted(named.split()) == sorted(re.findall(r"^part_(\w+)\(", text, re.MULTILINE))
    modules = re.findall(r"python -m ((?:tutorials|nanovllm)[.\w]*)", text)
    assert len(modules) == 2 and all(find_spec(module) for module in modules)
    paths = re.findall(r"tests/[\w/.]+", text)
    assert len(paths) == 5 and all((ROOT / path).exists() for path in paths)
    options = {option for action in bench.parser()._actions for option in action.option_strings}
    used = "\n".join(line for line in text.splitlines() if "bench" in line)
    assert {*re.findall(r" (--[a-z-]+)", used)} - {"--small"} <= options
