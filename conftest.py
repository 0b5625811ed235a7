"""Settings for all tests; pytest reads this file first.

What is marked slow is left out: by `@pytest.mark.slow` a test, by `@pytest.mark.slow(but_every=5)`
all but every fifth of its variants. `pytest --slow` runs everything. So does the variable SOLUTION,
with which students say what the public tests look at.
"""

import gc
import os
from collections import Counter

import pytest

# Two threads are hardly faster for models this small, and ten times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # who waits leaves the processor to others
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network

import torch

gc.disable()  # what is imported stays: until the tests begin, there is no garbage to look for
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: on the CPU


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, too")


def pytest_collection_finish() -> None:
    """Who looks for garbage needs not look at what was imported: half a second each time."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's bindings complain at the end


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow") or "SOLUTION" in os.environ:
        return
    num_variants: Counter[str] = Counter()
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow is None:
            continue
        name = item.nodeid.partition("[")[0]
        but_every = slow.kwargs.get("but_every")
        if but_every is None or num_variants[name] % but_every:
            item.add_marker(pytest.mark.skip(reason="slow: pytest --slow runs it"))
        num_variants[name] += 1
