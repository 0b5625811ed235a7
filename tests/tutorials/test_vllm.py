"""What the book says is in vLLM is there: files and symbols of the tables "The same in vLLM" and of
`reading_vllm.md` are in the list that `measure.vllm_symbols` made (tutorials/measure/README.md). What the tables name on our side is there, too.

Run: pytest tests/tutorials/test_vllm.py [-k 03_scheduler] [--slow]
"""

import json
import re

import pytest
from book import CHAPTERS, TUTORIALS

from tutorials.site.links import PLACE, lines_of_names

LIST = json.loads((TUTORIALS / "results" / "vllm_symbols.json").read_bytes())
HEADING = "## The same in vLLM\n"
COLUMNS = f"| Here | In vLLM {LIST['version']} | What is more there, and why |"
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[([^]]+)\]\(([^)#]+)\)")
PAGE = TUTORIALS / "reading_vllm.md"
STOP = re.compile(r"^## \d+\. .*?\n\n(`.*?)\n\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)


def section_of(text: str) -> str:
    """The part of a chapter that has the table."""
    assert text.count(HEADING) == 1, "there is no table 'The same in vLLM', or more than one"
    return text.partition(HEADING)[2].partition("\n## ")[0]


def rows_of(section: str) -> list[list[str]]:
    """The cells of each row, without the heads of the columns."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def problems_here(cell: str) -> list[str]:
    """What the first cell of a row names and is not there: links to files, whose texts are names."""
    links = LINK.findall(cell)
    problems = [] if links else [f"no link: {cell}"]
    for text, target in links:
        path = (TUTORIALS / target).resolve()
        names = CODE.findall(text)
        if not path.is_file() or not names:
            problems.append(f"{text} in {target}")
        else:
            problems += [
                f"{name} in {target}" for name in names if name not in lines_of_names(path)
            ]
    return problems


def named_in_vllm(cell: str) -> list[tuple[str, str]]:
    """Files and symbols, written as in `PLACE`, with a semicolon between two files."""
    pairs = []
    for part in cell.split("; "):
        place = PLACE.fullmatch(part)
        assert place is not None, f"a file and its symbols: {part}"
        pairs += [(place[1], symbol) for symbol in CODE.findall(place[2])]
    return pairs


def is_in_list(file: str, symbol: str) -> bool:
    classes = LIST["files"].get(file, {})
    owner, _, name = symbol.rpartition(".")
    return name in classes.get(owner, "").split() or (not owner and name in classes)


def problems_there(cell: str) -> list[str]:
    """What the second cell of a row names and vLLM does not have."""
    return [f"{s} in {file}" for file, s in named_in_vllm(cell) if not is_in_list(file, s)]


def unknown_files(text: str) -> list[str]:
    """Those that are named anywhere, perhaps without their folder, and are not in the list."""
    files = [f"/{file}" for file in LIST["files"]]
    named = [name for name in CODE.findall(text) if name.endswith(".py")]
    return [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


@each_chapter
def test_what_a_table_names_is_there(chapter):
    section = section_of(chapter.read_text(encoding="utf-8"))
    assert COLUMNS in section
    rows = rows_of(section)
    assert len(rows) >= 3, rows
    for row in rows:
        assert len(row) == 3, row
        assert problems_here(row[0]) == []
        assert problems_there(row[1]) == []
        assert len(row[2].split()) > 2 and unknown_files(row[2]) == [], row


@each_chapter
def test_a_table_is_of_the_version_of_the_list(chapter):
    section = section_of(chapter.read_text(encoding="utf-8"))
    versions = set(re.findall(r"vLLM (\d+\.\d+\.\d+)", section))
    assert versions == {LIST["version"]}


def test_the_way_of_a_request_has_twelve_stops():
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(f"# Reading vLLM {LIST['version']} after this book\n")
    stops = STOP.findall(text)
    assert len(stops) == 12
    for symbols, what in stops:
        assert problems_there(symbols) == []
        assert re.search(r"\[chapter \d\d\]\(\d\d_", what), f"no chapter explains it: {what}"
    assert unknown_files(text) == []
