"""What the search of the site looks through: the sections of all pages, the words of the glossary, names of modules.

It is a script and not JSON, because a page that was opened as a file may read scripts only.
"""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tutorials.site.links import ROOT, lines_of_names, page_of
from tutorials.site.pages import FENCE, Page
from tutorials.site.sources import first_line

SECTION = re.compile(r'^(?=#+ |\*\*[^*\n]+\*\* <a id=")', re.MULTILINE)
TERM = re.compile(r'\*\*([^*\n]+)\*\* <a id="([^"]+)"></a>')


def anchor_of(heading: str) -> str:
    """As GitHub makes it, and the generator, too."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def plain(text: str) -> str:
    """Words without marks: no addresses, no tags."""
    text = re.sub(r"\]\([^)]*\)|<[a-z/!][^>]*>", " ", text)
    text = html.unescape(text)
    return " ".join(re.sub(r"[*`|#[\]]|!\[|-{3,}", " ", text).split())


def sections(text: str) -> Iterator[tuple[str, str, str]]:
    """Heading, anchor and words of each section. Output of code is left out."""

    def code(fence: re.Match) -> str:
        return "" if fence[1] == "text" else re.sub(r"^(?=#)", " ", fence[3], flags=re.MULTILINE)

    for part in SECTION.split(FENCE.sub(code, text)):
        heading, _, rest = part.partition("\n")
        term = TERM.match(part)
        if term:
            yield term[1], term[2], plain(part[term.end() :])
        elif heading.startswith("#"):
            heading = plain(heading)
            yield heading, anchor_of(heading), plain(rest)


def address(path: Path) -> str:
    """Of the page that shows a file or folder, from the root of the site."""
    page = page_of(path)
    if page.name == "README.md":
        page = page.with_name("index.md")
    return page.with_suffix(".html").as_posix()


def entries(pages: list[Page]) -> Iterator[tuple[str, str, str, str]]:
    """Page, heading, address and words."""
    for page in pages:
        if (ROOT / page.path).is_dir():
            continue
        for i, (heading, anchor, words) in enumerate(sections(page.source)):
            place = address(page.path) + (f"#{anchor}" if i else "")
            yield page.title, heading if i else "", place, words
    for file in sorted((ROOT / "nanovllm").rglob("*.py")):
        path = file.relative_to(ROOT)
        words = " ".join([first_line(file), *lines_of_names(file)])
        yield path.as_posix(), "", address(path), words


def write_index(pages: list[Page], file: Path) -> None:
    rows = json.dumps(list(entries(pages)), separators=(",", ":"), ensure_ascii=False)
    file.write_text(f"window.searchIndex = {rows};\n", encoding="utf-8")
