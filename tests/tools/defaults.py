"""Runs tests once more in a process of its own, in which an option of the engine has another default: so whatever holds
for paging in software is asked of vAttention, too.

Tests import this file, and that process has it as a plugin of pytest:
    DEFAULT=overlap_default PYTHONPATH=tests/tools pytest -p defaults tests/core/test_recovery.py
"""

import os
import subprocess
import sys
from pathlib import Path

from nanovllm.config import Config

ROOT = Path(__file__).parents[2]
DEFAULTS = {
    "drafts_default": ("speculative_config", {"prompt_lookup_min": 1}),
    "overlap_default": ("overlap", True),
    "vattention_default": ("attention_backend", "vattention"),
}


def pytest_configure() -> None:
    name, value = DEFAULTS[os.environ["DEFAULT"]]
    setattr(Config, name, value)
    Config.__init__.__kwdefaults__[name] = value


def check_with(default: str, patterns: list[str], *more: str) -> None:
    """Asserts that these files of tests pass with this default. They are given within tests, as `glob` has them."""
    files = [str(path) for pattern in patterns for path in ROOT.glob(f"tests/{pattern}")]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "defaults", *files]
    folders = [str(ROOT), str(ROOT / "tests" / "tools")]
    done = subprocess.run(
        [*command, *more, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"DEFAULT": default, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
