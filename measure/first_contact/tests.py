"""Section 9: the tests that use a GPU, as programs of their own."""

import importlib.util
import sys
from functools import partial

from measure.first_contact.section import Section, run

ON_A_GPU = "tests/device/test_gpu.py"
ALONE = "memory_stays"  # the test that wants the GPU for itself
# no other files are collected: they may import what this machine lacks
FILES = [ON_A_GPU, "tests/device/test_cuda_graphs.py"]
FILES += [f"tests/core/test_{name}.py" for name in ("kernels", "fused", "sampler")]


def tests(section: Section) -> None:
    """The tests that use a GPU: first the one that wants it for itself, then all others."""
    if section.cpu:
        section.case(
            "one test", partial(pytest, section, ["tests/core/test_fused.py", "-k", "silu"])
        )
    else:
        section.case("alone", partial(pytest, section, alone()))
        section.case("others", partial(pytest, section, others()))
    for case in section.cases.values():
        print(*case.get("failures", []), *case.get("tail", [])[-25:], sep="\n", flush=True)


def alone() -> list[str]:
    """pytest's arguments for the test that is alone."""
    return [ON_A_GPU, "-k", ALONE]


def others() -> list[str]:
    """pytest's arguments for all tests of the GPU but the one that is alone."""
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    return [*FILES, "-k", f"not {ALONE} and not ahead_of_time", *parallel]


def pytest(section: Section, arguments: list[str]) -> dict:
    # a line for each test, as it ends: -vv, because pyproject.toml has a -q
    options = ["-p", "no:cacheprovider", "--slow", "-vv"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    return run(command, section.seconds_left())
