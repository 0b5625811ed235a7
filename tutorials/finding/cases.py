"""The cases of "Find it". The report and the hints of case N are in `cases/NN.md`; the fault, other
faults of its function, the answer and a test that finds them are for lecturers, in
`tests/course/solutions/finding/NN.md`."""

import re
from dataclasses import dataclass
from pathlib import Path

from tutorials.building.holes import replaced, source_of

ROOT = Path(__file__).parents[2]
REPORTS = Path(__file__).with_name("cases")
ANSWERS = ROOT / "tests" / "course" / "solutions" / "finding"
NUMBERS = [int(path.stem) for path in sorted(REPORTS.glob("*.md"))]


@dataclass
class Case:
    number: int
    report: str
    hints: list[str]  # from general to specific
    module: str  # a file of nanovllm
    function: str
    faults: list[str]  # the fault of the case, then the others: "old => new", several after ";;"
    tests: list[str]  # the engine's own, of the module
    test: str  # of a lecturer

    def source(self, package: Path, fault: str) -> str:
        """The module of a package with a fault in the function."""
        source = (package / self.module).read_text(encoding="utf-8")
        body = source_of(source, self.function)
        for change in fault.split(" ;; "):
            old, _, new = change.partition(" =>")
            changed = replaced(body, old.strip(), new[1:])
            if changed is None:
                raise ValueError(f"case {self.number}: {self.function} has no {old.strip()!r}")
            changed = re.sub(r"\n +\n", "\n", changed)  # a line that is gone
            source = source.replace(body, changed)
            body = changed
        return source


def case_of(number: int) -> Case:
    report, *hints = re.split(r"^# Hint \d\n", text_of(REPORTS, number), flags=re.MULTILINE)
    answer = text_of(ANSWERS, number)
    parts = dict(re.findall(r"^```\w+ \((\w+)\)\n(.*?)^```$", answer, re.MULTILINE | re.DOTALL))
    module, function, *tests = parts["place"].split()
    faults = parts["faults"].splitlines()
    hints = [hint.strip() for hint in hints]
    return Case(number, report, hints, module, function, faults, tests, parts["test"])


def text_of(folder: Path, number: int) -> str:
    return (folder / f"{number:02}.md").read_text(encoding="utf-8")
