"""The book as a site: what is staged, and how the pages look in a browser. Those that build it are slow, and the browser is
a Chromium.

Run: pytest tests/tutorials/test_site.py [--slow]
"""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from book import CHAPTERS, ROOT, TUTORIALS
from browser import opened
from extras import needs

from tutorials.site.api import api_page
from tutorials.site.links import CODE, PLACE, VLLM, VLLM_ADDRESS, Links, page_of
from tutorials.site.pages import Page

HERE = Path("tutorials/03_scheduler.md")
SITE = ROOT / "tutorials" / "site"


def staged(text: str, path: Path = HERE) -> str:
    return Page(path, text).body()


# --- what becomes of a text ---


def test_code_shows_its_output():
    text = "```python\nx = 1\nprint(x)\n```\n\n```text (varies)\n<1>\n```\n\n```text\n2\n```\n"
    code, output, other = re.findall(r"<pre.*?</pre>", staged(text), re.DOTALL)
    assert 'class="code runs"' in code and "<span" in code
    assert 'data-label="prints, for example"' in output and "&lt;1&gt;\n</code>" in output
    assert 'class="code quote"' in other  # below no code: it is no output
    assert 'data-label="prints"' in staged(text.replace(" (varies)", ""))


def test_a_run_is_an_element_with_its_run_and_step():
    link = "[Play: a hit, from step 5](../nanovllm/topics/server/page/runs/prefix_hit.json#5)"
    found = staged(f"before\n\n{link}\n\nafter\n")
    (element,) = re.findall(r"<nano-run.*?</nano-run>", found)
    assert element.startswith('<nano-run step="5"><script type="application/json">{"')
    assert element.count("<") == 4, "a < in the run would end it"
    assert (
        "before\n\n<div" in found and "</div>\n\nafter" in found and "A hit, from step 5" in found
    )


def test_boxes_and_folded_parts():
    text = "> **Take away:** one\n> two.\n\n> **Change one number:** a.\n\n> said\n\n<details>\n"
    found = staged(text)
    assert '<div class="box take" markdown="1">\n\n**Take away.** one\ntwo.\n\n</div>' in found
    assert '<div class="box change"' in found and "\n> said\n" in found
    assert '<details markdown="1">' in found


def test_a_table_is_in_a_frame_with_a_name():
    table = "| b |\n|---|\n| c |\n"
    found = staged(f"a\n\n{table}\n```text\nd\n```\n\n{table.replace('b', '| e')}")
    assert f'aria-label="Table 1" tabindex="0" markdown="1">\n\n{table}\n</div>' in found
    assert 'aria-label="Table 2"' in found
    assert '| <span class="unseen">Row</span> | e |' in found  # not an empty head


# --- links ---


def test_links_lead_to_pages():
    links = Links(HERE)
    assert links.target("../nanovllm/scheduler.py", "`Scheduler.victim`, `Nothing`").endswith(
        "nanovllm/scheduler.py.md#Scheduler.victim"
    )
    assert (
        links.target("../nanovllm/topics/swapping", "x") == "../nanovllm/topics/swapping/index.md"
    )
    assert links.target("../README.md#how-fast", "x") == "../repository.md#how-fast"
    assert links.target("results/memory.json", "x") == "results/memory.json"
    assert links.target("https://arxiv.org", "x") == "https://arxiv.org"
    assert Path("nanovllm/scheduler.py") in links.wanted
    with pytest.raises(ValueError, match="links to nothing.md, which is not there"):
        links.target("nothing.md", "x")
    picture = "[![a](figures/overview_seats.png)](01_ladder.md)"
    assert staged(picture) == picture
    assert page_of(Path("LICENSE")) == Path("LICENSE.md")


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_symbols_of_vllm_lead_to_their_file(chapter):
    text = chapter.read_text(encoding="utf-8")
    found = staged(text, chapter.relative_to(ROOT))
    assert f"/v{VLLM['version']}/" in VLLM_ADDRESS
    places = PLACE.findall(text.partition("## The same in vLLM\n")[2].partition("\n## ")[0])
    assert len(places) >= 3
    for file, symbols in places:
        assert f"[`{file}`]({VLLM_ADDRESS}{file})" in found
        for symbol in CODE.findall(symbols):
            assert re.search(rf"\[`{re.escape(symbol)}`\]\({re.escape(VLLM_ADDRESS)}", found)


# --- a chapter, and all of them ---


def test_every_chapter_and_handout_is_in_the_menu():
    menu = set(
        re.findall(r"^      - (.*)$", (SITE / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    )
    text_pages = [*TUTORIALS.glob("*.md"), *TUTORIALS.glob("assignments/a?/README.md")]
    assert {page.relative_to(ROOT).as_posix() for page in text_pages} <= menu


def test_the_api_has_the_public_names():
    page = api_page()
    for name in ("LLM.generate", "LLM.stream", "Scheduler.victim", "BlockManager"):
        assert re.search(rf"^#+ {re.escape(name)}$", page, re.MULTILINE)
    for name in ("temperature", "max_num_batched_tokens", "beam_width", "choice"):
        assert f"| `{name}` |" in page
    assert "Scheduler.schedule_running" not in page  # the mechanism
    assert "| `outputs` | <code>list[CompletionOutput]</code>" in page


# --- the pages, built ---


class Parts(HTMLParser):
    """Of a page: what it links to, and where it can be linked to."""

    def __init__(self, page: Path):
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.targets += [found[name] for name in ("href", "src") if name in found]
        if "id" in found:
            assert found["id"] not in self.ids, f"twice: {found['id']}"
            self.ids.add(found["id"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    needs("properdocs")
    out = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "tutorials.site", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+ pages: [\d.]+ MB, \d+ s$", done.stdout, re.MULTILINE)
    return out


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    yield from opened(tmp_path_factory)


def pages_of_book(site: Path) -> list[Path]:
    """All but the lab, which has tests of its own."""
    return [page for page in site.rglob("*.html") if page != site / "lab.html"]


@pytest.mark.slow
def test_no_link_is_broken_and_nothing_comes_from_a_network(site):
    parts = {page: Parts(page) for page in pages_of_book(site)}
    assert len(parts) > 200
    for page, found in parts.items():
        for target in found.targets:
            if target.startswith(("https:", "mailto:", "data:")):
                continue
            file, _, anchor = unquote(target).partition("#")
            path = Path(os.path.normpath(page.parent / file)) if file else page
            assert path.is_file(), f"{page.relative_to(site)} links to {target}"
            if anchor and path in parts:
                assert anchor in parts[path].ids, f"{page.relative_to(site)} links to {target}"
    text = "".join(page.read_text(encoding="utf-8") for page in parts)
    assert not re.search(r"<(script|img|link|iframe)[^>]*(src|href)=.?https?:", text)


@pytest.mark.slow
def test_no_mark_of_markdown_is_left(site):
    """A generator that reads a text otherwise than GitHub leaves its marks in the page."""
    for page in pages_of_book(site):
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
        found = MARKS.search(text)
        assert not found, f"{page.relative_to(site)}: {found[0][:200]}"


MARKS = re.compile(
    r".*(?:\]\(|```|\*\*\S|markdown=|<p>(?:- |1\. )).*|^(?:\||- |1\. ).*", re.MULTILINE
)
DRAWN = "document.querySelector('nano-run').$('blocks').children.length"


@pytest.mark.slow
def test_what_is_read_is_kept(site, browser):
    chapter = (site / "tutorials" / "03_scheduler.html").as_uri()
    count = len(CHAPTERS)
    browser.open(chapter)
    browser.value("localStorage.clear()")
    browser.open((site / "index.html").as_uri())
    assert browser.text("#site-progress") == f"0 of {count} read. "
    browser.open(chapter)
    browser.click("input[data-chapter]")
    assert browser.text(".done span") == f"(1 of {count} read)"
    browser.wait("localStorage.getItem('nanovllm-place')?.includes('Exercises')")
    browser.open((site / "index.html").as_uri())
    assert browser.text("#site-progress").startswith(f"1 of {count} read. Go on: 03. The scheduler")
    assert browser.text("[data-read='03']").endswith("minutes, read")
    browser.wait(DRAWN)  # what is below it moves no more
    browser.click("#site-progress a")
    browser.wait("location.href.includes('03_scheduler.html#exercises')")
    browser.wait(
        "document.querySelector('input[data-chapter]')?.checked && document.readyState === 'complete'"
    )
    browser.click("input[data-chapter]")
    assert browser.text(".done span") == f"(0 of {count} read)"
    browser.value("localStorage.clear()")


@pytest.mark.slow
def test_search_finds_and_needs_only_the_keyboard(site, browser):
    browser.errors.clear()
    browser.open((site / "tutorials" / "05_model.html").as_uri())
    browser.value(
        "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '/', bubbles: true}))"
    )
    browser.wait("document.activeElement.id === 'site-words'")
    browser.write("block table")
    browser.wait("document.querySelectorAll('#site-found a').length > 3")
    assert browser.text("#site-found a").startswith("block table (Glossary)")
    down = "dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true}))"
    browser.value(f"document.activeElement.{down}")
    assert browser.value("document.activeElement === document.querySelector('#site-found a')")
    browser.press("Enter")
    browser.wait(
        "location.href.endsWith('glossary.html#block-table') && document.readyState === 'complete'"
    )
    for asked, count, first in (
        ("SchedulerThatIsNotThere", "0 found", ""),
        ("schedular", "found for \u201cscheduler\u201d, 0 for \u201cschedular\u201d", "scheduler"),
        ("how to install?", " found", "Install it"),
    ):
        browser.click("#site-words")
        browser.value("document.activeElement.select()")
        browser.write(asked)
        said = "document.querySelector('#site-found p')?.textContent"
        browser.wait(f"{said}.endsWith({json.dumps(count)})")
        found = browser.value("document.querySelector('#site-found a')?.textContent ?? ''")
        assert found.lower().startswith(first.lower())
    assert browser.text("#site-scheme") in browser.value("$('scheme').ariaLabel")
    assert browser.errors == []
