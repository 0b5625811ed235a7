"""A page of the book as Markdown that any generator reads: code is coloured, runs are elements, links lead to pages.

What GitHub shows and what a generator shows come from the same text. These conventions are read here:

- a block ```` ```python ```` and the ```` ```text ```` below it, which is what it prints;
- a paragraph `[Play: what, from step 9](../nanovllm/topics/server/page/runs/x.json#9)`, which becomes the player;
- block quotes that begin with `**Take away:**` or `**Change one number:**`, which become boxes;
- `<details>`, which stays folded.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tutorials.site.links import ROOT, Links
from tutorials.site.sources import block
from tutorials.words import TABLE, minutes

FENCE = re.compile(r"^```(\w*)(?: \(([^)\n]*)\))?\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
RUN = re.compile(r"^\[Play: ([^]\n]*)\]\(([^)#\s]+\.json)#(\d+)\)$", re.MULTILINE)
BOX = re.compile(r"^> \*\*(Take away|Change one number):\*\* (.*(?:\n>.*)*)\n", re.MULTILINE)
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
CHAPTER = re.compile(r"\d\d_\w+")
READING_VLLM = Path("tutorials/reading_vllm.md")
SAME_IN_VLLM = "## The same in vLLM\n"


def is_chapter(path: Path) -> bool:
    return path.parent == Path("tutorials") and CHAPTER.fullmatch(path.stem) is not None


def title_of(text: str) -> str:
    found = HEADING.search(FENCE.sub("", text))
    return re.sub(r"`|\]\([^)]*\)|\[", "", found[2]) if found else ""


# --- code, runs, boxes, tables ---


def run_element(what: str, run: Path, step: str) -> str:
    """The player, with its run in the page: a page that was opened as a file may not read other files."""
    inside = json.dumps(json.loads((ROOT / run).read_bytes()), separators=(",", ":"))
    inside = inside.replace("<", "\\u003c")
    return (
        f'<div class="run"><p>{what[0].upper()}{what[1:]}</p><nano-run step="{step}">'
        f'<script type="application/json">{inside}</script></nano-run></div>'
    )


def with_boxes(text: str) -> str:
    """Block quotes of the two kinds, as boxes."""

    def box(match: re.Match) -> str:
        kind = "take" if match[1] == "Take away" else "change"
        inside = re.sub(r"^> ?", "", match[2], flags=re.MULTILINE)
        return f'<div class="box {kind}" markdown="1">\n\n**{match[1]}.** {inside}\n\n</div>\n'

    return BOX.sub(box, text)


def with_tables(text: str, numbers: Iterator[int]) -> str:
    """Tables in a frame that scrolls on a phone. Screen readers hear its number, and a word for an empty cell of its head."""
    frame = '<div class="table" role="region" aria-label="Table {}" tabindex="0" markdown="1">\n\n{}{}\n</div>\n'

    def framed(table: re.Match) -> str:
        head, end, rows = table[0].partition("\n")
        head = re.sub(r"\| +(?=\|)", '| <span class="unseen">Row</span> ', head)
        return frame.format(next(numbers), head, end + rows)

    return TABLE.sub(framed, text)


class Page:
    """One page: its text, and the files that it links to."""

    def __init__(self, path: Path, text: str):
        self.links = Links(path)
        self.title = title_of(text)
        self.path = path
        self.source = text
        self.table_numbers = count(1)
        self.has_run = RUN.search(FENCE.sub("", text)) is not None

    def staged(self) -> str:
        text = self.body()
        return self.with_habits(text) if is_chapter(self.path) else text

    def body(self) -> str:
        """The text, with its blocks of code and what is between them."""
        parts = []
        end = 0
        is_below_code = False
        for fence in FENCE.finditer(self.source):
            between = self.source[end : fence.start()]
            language, note, code = fence.groups()
            is_output = language == "text" and is_below_code and not between.strip()
            parts += [self.prose(between), block(language, note or "", code, is_output)]
            is_below_code = language in ("python", "bash")
            end = fence.end()
        return "".join([*parts, self.prose(self.source[end:])])

    def prose(self, text: str) -> str:
        """In the section of vLLM, names are those of vLLM."""
        first, heading, rest = text.partition(SAME_IN_VLLM)
        table, following, last = rest.partition("\n## ")
        is_of_vllm = self.path == READING_VLLM
        first = self.marked(first, is_of_vllm)
        return first + heading + self.marked(table, True) + following + self.marked(last)

    def marked(self, text: str, of_vllm: bool = False) -> str:
        text = RUN.sub(self.run, text)
        text = re.sub(r"^<details>", '<details markdown="1">', text, flags=re.MULTILINE)
        # a stop or a row at a time: its symbols are those of its files
        units = re.split(r"(^## .*\n|^\|.*\n|^#.*\n)", text, flags=re.MULTILINE)
        text = "".join(
            unit
            if unit.startswith(("#", '<div class="run">'))
            else self.links.rewrite(unit, of_vllm)
            for unit in units
        )
        return with_tables(with_boxes(text), self.table_numbers)

    def run(self, match: re.Match) -> str:
        path = posixpath.normpath((self.path.parent / match[2]).as_posix())
        return run_element(match[1], Path(path), match[3])

    def with_habits(self, text: str) -> str:
        """Minutes to read below the title, and at the end a box to tick."""
        number = self.path.stem[:2]
        first, _, rest = text.partition("\n")
        top = (
            f'<p class="minutes">{minutes(self.source)} minutes to read, without what is folded</p>'
        )
        end = (
            f'<p class="done"><label><input type="checkbox" data-chapter="{number}" disabled> '
            f"I have read chapter {number}</label> <span></span></p>"
        )
        return f"{first}\n\n{top}\n{rest}\n\n{end}\n"
