"""The forge's workflows run what is there. They cannot run here.

Run: pytest tests/house/test_workflows.py
"""

import re
from pathlib import Path

import pytest

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
