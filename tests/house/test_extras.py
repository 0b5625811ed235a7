"""What is not installed skips the tests that need it, and nothing else.

Run: pytest tests/house/test_extras.py
"""

import re
import sys
from pathlib import Path

import pytest

from tests.tools.extras import EXTRAS, File, needs

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def collected(request, tmp_path):
    """What pytest finds in a file with this text."""

    def collect(text: str) -> list[str]:
        path = tmp_path / f"test_{abs(hash(text))}.py"
        path.write_text(text)
        return [item.name for item in File.from_parent(request.session, path=path).collect()]

    return collect


@pytest.mark.parametrize("module", EXTRAS)
def test_an_extra_has_the_module(module):
    (requirements,) = re.findall(
        rf"^{EXTRAS[module]} = (.*)", PROJECT.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert re.search(rf'"{module.replace("_", "-")}\b', requirements)


@pytest.mark.parametrize("module", EXTRAS)
def test_a_file_without_its_module_is_skipped(module, collected, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(pytest.skip.Exception, match=f"needs the extra '{EXTRAS[module]}'"):
        collected(f"from {module} import something\ndef test_a(): pass")
    with pytest.raises(pytest.skip.Exception, match=f"needs the extra '{EXTRAS[module]}'"):
        needs(module)


def test_a_file_for_another_system_is_skipped(collected, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(pytest.skip.Exception, match="needs triton, which this system does not"):
        collected("from triton import jit\ndef test_a(): pass")
    with pytest.raises(pytest.skip.Exception, match="the grader needs Linux"):
        collected("raise SystemExit('the grader needs Linux')")


def test_a_file_with_another_error_is_not_skipped(collected):
    for text in ("import nothing_of_this_name", "from pytest import nothing", "1 / 0", "1 +"):
        with pytest.raises((File.CollectError, ZeroDivisionError)):
            collected(text)
    assert collected("def test_a(): pass") == ["test_a"]
