"""The milestones of "Build it", read from milestones.txt."""

import re
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("milestones.txt")
MILESTONE = re.compile(r"(\d+) (.+), chapter (\d\d)(, with numba)?$")
HOLES = re.compile(r"    holes in (\S+): (.+)$")
GROUP = re.compile(r"    (.+): (\S+\.md#\S+) ([^\s[]+)(?:(\[\w+)\])?$")
POINTS = 10  # of a group of tests


class Group(NamedTuple):
    """Tests that are worth points together, and the section of the book that helps with them."""

    name: str
    section: str
    file: str
    variant: str  # the beginning of the variants, such as "[numba"; empty: all of them
    tests: list[str]

    def has(self, nodeid: str) -> bool:
        """Whether a test of pytest is one of these."""
        names = nodeid.partition("[")[0].split("::")
        return names[0] == self.file and names[1] in self.tests and self.variant in nodeid


class Milestone(NamedTuple):
    number: int
    name: str
    chapter: str
    has_numba: bool  # whether its tests compile kernels
    holes: dict[str, list[str]]  # a file of nanovllm -> its functions
    groups: list[Group]

    @property
    def message(self) -> str:
        """What an open hole raises."""
        return f"milestone {self.number}, chapter {self.chapter}"

    @property
    def is_last(self) -> bool:
        """Whether it checks the whole engine."""
        return not self.holes

    @property
    def tests(self) -> list[str]:
        return [
            f"{group.file}::{test}{group.variant}" for group in self.groups for test in group.tests
        ]

    def group_of(self, nodeid: str) -> Group:
        return next(group for group in self.groups if group.has(nodeid))


def title_of(nodeid: str) -> str:
    """What the name of a test says."""
    name = nodeid.rpartition("::")[2].partition("[")[0]
    return name.removeprefix("test_").replace("_", " ")


def milestone_of(paragraph: str) -> Milestone:
    first, *lines = paragraph.splitlines()
    match = MILESTONE.match(first)
    assert match, first
    milestone = Milestone(int(match[1]), match[2], match[3], match[4] is not None, {}, [])
    for line in lines:
        if match := HOLES.match(line):
            milestone.holes[match[1]] = match[2].split()
        elif match := GROUP.match(line):
            file, variant = f"tests/{match[3]}", match[4] or ""
            milestone.groups.append(Group(match[1], match[2], file, variant, []))
        else:
            name = line.strip()
            test = name if name.startswith("Test") else f"test_{name}"
            milestone.groups[-1].tests.append(test)
    return milestone


MILESTONES = [*map(milestone_of, TABLE.read_text(encoding="utf-8").strip().split("\n\n")[1:])]
for one in MILESTONES[:-1]:  # the last one fails for an engine that any other would fail
    name = f"milestone {one.number}, {one.name}"
    MILESTONES[-1].groups.extend(
        group._replace(name=f"{name}: {group.name}") for group in one.groups
    )
