"""Section 7: the tests that use a GPU, as programs of their own."""

import importlib.util
import sys
from functools import partial

from tutorials.performance.first_contact.section import Section, run

ALONE = "memory_stays"  # the test that wants the GPU for itself


def tests(section: Section) -> None:
    """The tests that use a GPU: first the one that wants it for itself, then all others."""
    if section.cpu:
        section.case("one test", partial(pytest, section, "tests/core/test_fused.py", "-k", "silu"))
    else:
        section.case("alone", partial(pytest, section, "-m", "gpu", "tests", "-k", ALONE))
        section.case("others", partial(pytest, section, *others()))
    for case in section.cases.values():
        print(*case.get("tail", [])[-25:], sep="\n", flush=True)


def others() -> list[str]:
    """pytest's arguments for all tests of the GPU but the one that is alone."""
    names = ("device", "core/test_kernels.py", "core/test_fused.py", "core/test_sampler.py")
    files = [f"tests/{name}" for name in names]
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    return [*files, "-k", f"not {ALONE} and not ahead_of_time", *parallel]


def pytest(section: Section, *arguments: str) -> dict:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--slow", *arguments]
    return run(command, section.seconds_left())
