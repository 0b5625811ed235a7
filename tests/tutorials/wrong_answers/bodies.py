"""Wrong bodies for "Build it", in bodies.txt: a function of a milestone, then a body a line:

1 BlockManager.free
    block.ref_count -= 1 => pass | blocks come on demand

What is replaced in our body, and a regular expression for what the tests say; `all pass` for another
right body, with a reason where no test tells a wrong one apart. More replacements come behind `;;`. What is replaced stands once in the function of the
heading, or else once in the milestone. A line break is written as \\n, without the indentation.
"""

from pathlib import Path
from typing import NamedTuple

from tutorials.building.holes import replaced, source_of

TABLE = Path(__file__).with_name("bodies.txt")


class WrongBody(NamedTuple):
    milestone: int
    function: str
    text: str  # its replacements
    says: str

    def changed(self, modules: dict[str, str]) -> dict[str, str]:
        """The milestone's modules with this body."""
        modules = {**modules}
        for change in self.text.split(" ;; "):
            old, _, new = change.partition(" =>")
            self.put(modules, old.strip(), new[1:])
        return modules

    def put(self, modules: dict[str, str], old: str, new: str) -> None:
        for whole in (False, True):  # the function, then all
            for module, source in modules.items():
                scope = source if whole else source_of(source, self.function)
                if (changed := replaced(scope, old, new)) is not None:
                    modules[module] = source.replace(scope, changed)
                    return
        raise AssertionError(f"{self}: not in this milestone")


def wrong_bodies() -> list[WrongBody]:
    """All of the table."""
    found = []
    milestone, function = "", ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            text, _, says = line.strip().rpartition(" | ")
            found.append(WrongBody(int(milestone), function, text, says))
        else:
            milestone, function = line.split()
    return found
