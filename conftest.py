"""Settings for all tests; pytest reads this file first.

pytest leaves out what is marked slow; pytest --slow runs everything, and with -n auto on all processors.
"""

import os
from pathlib import Path

import pytest

# Two threads are hardly faster for models this small, and ten times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is: its kernels run on the CPU


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: pytest --slow runs it"))
