"""The chapters follow the contract: something runs at once, few words, two pictures, words explained before they are used.

Run: pytest tests/tutorials/test_book.py [-k 02_blocks]
"""

import json
import re

import pytest
from book import CHAPTERS, FENCE, ROOT, TUTORIALS, WORDS, first_reading, num_words

FIRST_BLOCK = re.compile(r"^```(?:python|bash)\n.*?^```\n\n?```text.*?\n(.*?)^```\n", re.M | re.S)
GLOSSARY = re.compile(r"^\*\*(?P<terms>[^*]+)\*\* <a id=\"(?P<anchor>[a-z-]+)\"></a>", re.MULTILINE)
VERSION = re.compile(r"\d+\.\d+|20\d\d")
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)


@each_chapter
def test_something_runs_within_400_words_and_prints_a_number(chapter):
    text = chapter.read_text(encoding="utf-8")
    block = FIRST_BLOCK.search(text)
    assert block is not None, "no block with its output"
    words = num_words(text[: block.start()])
    assert words <= 400, f"{words} words before the first block that runs"
    assert re.search(r"\d", block[1]), f"the first block prints no number: {block[1]}"


@each_chapter
def test_a_first_reading_has_as_many_words_as_the_table_allows(chapter):
    words = num_words(chapter.read_text(encoding="utf-8"))
    assert words <= WORDS[chapter.stem], f"{words} words"


def test_the_book_is_complete_and_short():
    assert [chapter.stem for chapter in CHAPTERS] == sorted(WORDS)
    assert sum(num_words(chapter.read_text(encoding="utf-8")) for chapter in CHAPTERS) <= 35_000


@each_chapter
def test_two_pictures(chapter):
    pictures = re.findall(
        r"!\[([^]]*)\]\(figures/", first_reading(chapter.read_text(encoding="utf-8"))
    )
    assert len(pictures) >= 2, pictures
    assert all(len(text.split()) > 4 for text in pictures), "a picture needs a text that says it"


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[-])|\n\n", text)


def unversioned(text: str) -> list[str]:
    """Sentences that mention vLLM without a version, in sections whose heading has none. The table of
    the same in vLLM is of the version that its section names."""
    found = []
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        versioned = section if heading == "## The same in vLLM" else heading
        if not VERSION.search(versioned):
            found += [s for s in sentences(section) if "vLLM" in s and not VERSION.search(s)]
    return found


@each_chapter
def test_what_is_said_of_vllm_has_a_version(chapter):
    text = re.sub(r"\]\([^)]*\)", "]", FENCE.sub("", chapter.read_text(encoding="utf-8")))
    assert unversioned(text) == []


# --- the glossary ---


def glossary() -> dict[str, list[str]]:
    """The words for each anchor: a term, and other forms of it."""
    text = (TUTORIALS / "glossary.md").read_text(encoding="utf-8")
    return {m["anchor"]: m["terms"].split(", ") for m in GLOSSARY.finditer(text)}


def occurrence(terms: list[str], text: str) -> re.Match | None:
    """The first place where one of these words stands, alone or as a plural."""
    words = "|".join(rf"{re.escape(term)}(?:s|es)?" for term in terms)
    return re.search(rf"(?<![\w-])(?:{words})(?![\w-])", text, re.IGNORECASE)


def linked(text: str, found: re.Match, anchor: str) -> bool:
    """Whether this place is within a link to the glossary's entry."""
    opened = text.rfind("[", 0, found.start())
    link = re.match(r"\[[^]]*\]\(glossary\.md#([a-z-]+)\)", text[max(0, opened) :])
    return link is not None and link[1] == anchor and opened + link.end() > found.start()


def reading(text: str) -> str:
    """A first reading with its links, without headings."""
    text = FENCE.sub("", first_reading(text))
    text = re.sub(r"^(\||#|!\[).*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: "_" * len(code[0]), text)


@each_chapter
def test_the_first_use_of_a_term_links_to_the_glossary(chapter):
    whole = reading(chapter.read_text(encoding="utf-8"))
    missing = []
    for anchor, terms in glossary().items():
        # "grouped-query attention" links to a term of its own
        others = rf"\[[^]]*\]\(glossary\.md#(?!{anchor}\))[^)]*\)"
        text = re.sub(others, lambda link: "_" * len(link[0]), whole)
        found = occurrence(terms, text)
        if found and not linked(text, found, anchor):
            missing.append(text[max(0, found.start() - 40) : found.end() + 20])
    assert missing == []


def test_a_term_is_defined_where_it_is_used_first():
    """The glossary links to the chapter that explains a term, and no earlier chapter uses it."""
    text = (TUTORIALS / "glossary.md").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\*\*)", text)
    texts = {chapter.name: reading(chapter.read_text(encoding="utf-8")) for chapter in CHAPTERS}
    for entry in entries[1:]:
        match = GLOSSARY.match(entry)
        assert match, entry
        terms = match["terms"].split(", ")
        used = [name for name, text in texts.items() if occurrence(terms, text)]
        links = re.findall(r"\]\((\d\d_\w+\.md)", entry)
        assert links, f"{terms[0]}: no link to a chapter"
        assert used and links[-1] == used[0], f"{terms[0]}: {links[-1:]} defines it, used: {used}"


def test_the_glossary_is_in_order_and_every_link_to_it_has_an_entry():
    anchors = list(glossary())
    assert anchors == sorted(anchors)
    for page in [*TUTORIALS.glob("*.md"), ROOT / "README.md"]:
        wanted = re.findall(r"glossary\.md#([\w-]+)", page.read_text(encoding="utf-8"))
        assert set(wanted) <= set(anchors), page.name


def test_results_say_where_they_come_from():
    """A number on a page can be measured again only if its code is known."""
    for path in (TUTORIALS / "results").glob("*.json"):
        result = json.loads(path.read_bytes())
        assert {"command", "commit", "device", "python"} <= result.keys(), path.name
        assert not result["commit"].endswith("-dirty"), path.name


def test_what_has_run_where_is_what_the_files_say():
    """README's table: a cell links to a result of its commit, and each commit with a result of a GPU is
    in the column of this GPU."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("### What has run where\n")[2].partition("\n## ")[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    reports = {path: json.loads(path.read_bytes()) for path in TUTORIALS.glob("results/**/*.json")}
    reports = {path: report for path, report in reports.items() if "commit" in report}
    for head, _, *cells in [*zip(*table)][1:]:
        links = [re.search(r"\[(\w+)\]\((.*)\)", cell) for cell in cells]
        shown = {(link[1], link[2]) for link in links if link}
        others = {cell.strip() for cell, link in zip(cells, links) if not link}
        assert others <= {"never", "tests only"}
        for commit, target in shown:
            found = [r for path, r in reports.items() if str(path).startswith(str(ROOT / target))]
            assert any(report["commit"].startswith(commit) for report in found), target
        ran = {r["commit"][:7] for r in reports.values() if f" {head.strip()}" in r["device"]}
        assert ran <= {commit for commit, _ in shown}, head


# --- links ---


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize(
    "page",
    [*sorted(TUTORIALS.glob("*.md")), *TUTORIALS.glob("finding/*.md"), ROOT / "README.md"],
    ids=lambda path: path.stem,
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file) if file else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor and path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            found = {anchor_of(h) for h in headings} | set(re.findall(r'<a id="([^"]+)"', text))
            assert anchor in found, f"{page.name} links to {target}"
