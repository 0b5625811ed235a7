"""What the tests rest on: GPUs are hidden, and a missing extra skips only the tests that need it.

Run: pytest tests/house/test_framework.py
"""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.tools.extras import EXTRAS, File, needs

ROOT = Path(__file__).parents[2]


def test_gpus_are_hidden_unless_they_are_asked_for(pytestconfig):
    """Most tests are about a CPU, and would take a GPU as the default device."""
    if pytestconfig.getoption("--gpu"):
        pytest.skip("--gpu is given")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1" and torch.cuda.device_count() == 0


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
