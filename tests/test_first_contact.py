"""The script for the first minutes on a GPU runs without one, so that no typo is left for the day it matters.

Run: pytest tests/test_first_contact.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's interpreter runs on Linux")
def test_the_first_four_sections_run_on_a_cpu(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tests.first_contact",
        "--cpu",
        "--sections",
        "1,2,3,4",
        "--out",
        str(tmp_path),
    ]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        "1_machine.json",
        "2_kernels.json",
        "3_engine.json",
        "4_decode_step.json",
    ]
    for file in files:
        results = json.loads(file.read_text())
        assert results["cases"] and not results["skipped"] and "error" not in results, file.name
