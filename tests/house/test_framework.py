"""What the tests rest on: GPUs are hidden,
the book is left out unless it is named, and a missing extra skips only the tests that need it.

Run: pytest tests/house/test_framework.py [--slow]
"""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import rooms
import torch

from tests.tools.extras import EXTRAS, File, needs

ROOT = Path(__file__).parents[2]


def test_gpus_are_hidden_unless_they_are_asked_for(pytestconfig):
    """Most tests are about a CPU, and would take a GPU as the default device."""
    if pytestconfig.getoption("--gpu"):
        pytest.skip("--gpu is given")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1" and torch.cuda.device_count() == 0


@pytest.mark.parametrize(
    "given, wants_all, is_left_out, first",
    [
        (["tests"], False, True, "tests"),
        (["tests"], True, False, "tutorials/assignments"),
        (["tests/course"], False, False, "tests/course"),
    ],
)
def test_the_book_is_left_out_unless_it_is_named(given, wants_all, is_left_out, first):
    sources = pytest.Config.ArgsSource
    config = SimpleNamespace(
        args=given,
        args_source=sources.TESTPATHS if given == ["tests"] else sources.ARGS,
        ArgsSource=sources,
        option=SimpleNamespace(all=wants_all),
    )
    rooms.choose(config)
    assert config.args[0] == first
    for room in ("course", "simulator", "tutorials"):
        assert rooms.is_left_out(ROOT / "tests" / room, config) == is_left_out
    assert not rooms.is_left_out(ROOT / "tests" / "core", config)


@pytest.mark.parametrize("module", EXTRAS)
def test_a_file_without_its_module_is_skipped(module, request, tmp_path, monkeypatch):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (requirements,) = re.findall(rf"^{EXTRAS[module]} = (.*)", project, re.MULTILINE)
    assert re.search(rf'"{module.replace("_", "-")}\b', requirements)
    path = tmp_path / "test_inner.py"
    path.write_text(f"from {module} import something\ndef test_a(): pass")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(pytest.skip.Exception, match=f"needs the extra '{EXTRAS[module]}'"):
        File.from_parent(request.session, path=path).collect()
    with pytest.raises(pytest.skip.Exception, match=f"needs the extra '{EXTRAS[module]}'"):
        needs(module)


def test_a_file_with_another_error_is_not_skipped(request, tmp_path):
    path = tmp_path / "test_inner.py"
    path.write_text("import nothing_of_this_name")
    with pytest.raises(File.CollectError):
        File.from_parent(request.session, path=path).collect()
