"""The sections, their shares of the time, and what the process of one must know."""

from pathlib import Path
from typing import NamedTuple

AT_FIRST = "its start"
PACKAGE = "measure.first_contact"
MINUTES = 9
SECTIONS = {  # the module and its function, and its seconds of 9 minutes; the last has what is left
    "machine": 45,  # of which the first import of torch may take half
    "kernels": 55,
    "engine": 90,
    "decode_step": 60,
    "benchmark": 65,
    "calibration": 60,
    "options": 65,
    "sweep": 60,
    "tests": 40,
}


class Job(NamedTuple):
    """What the process of a section must know."""

    function: str  # "package.module:name"
    path: Path  # of the results
    deadline: float  # by time.time()
    cpu: bool


def job_of(name: str, folder: Path, deadline: float, cpu: bool) -> Job:
    path = folder.absolute() / f"{number_of(name)}_{name}.json"
    return Job(f"{PACKAGE}.{name}:{name}", path, deadline, cpu)


def number_of(name: str) -> int:
    return list(SECTIONS).index(name) + 1
