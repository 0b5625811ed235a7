"""Runs tests once more in a process of its own, with other defaults: see other_defaults.py.

Tests import this file. An example that does: pytest tests/vattention/test_vattention.py --slow -k paging_in_software
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check_with(options: dict, patterns: list[str], *more: str) -> None:
    """Asserts that these files of tests pass with these defaults. They are given within tests, as `glob` has them."""
    files = [str(path) for pattern in patterns for path in ROOT.glob(f"tests/{pattern}")]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "other_defaults", *files]
    paths = [str(ROOT), str(ROOT / "tests" / "tools")]
    done = subprocess.run(
        [*command, *more, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "DEFAULTS": json.dumps(options)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
