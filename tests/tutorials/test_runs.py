"""The recorded runs that chapters name: each link leads to a step that exists, and there the player shows what the
chapter says. What plays them is slow, and needs a Chromium.

Run: pytest tests/tutorials/test_runs.py --slow [-k prefix_hit]
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from book import TUTORIALS
from browser import CHROMIUM, opened
from page_server import PAGE, run_named

LINK = re.compile(r"\[Play: [^]]*\]\([^)]*\)")
PARAGRAPH = re.compile(
    r"(?:^|\n\n)\[Play: [^]\n]*, from step (\d+)\]\(\.\./nanovllm/topics/server/page/runs/(\w+)\.json#(\d+)\)(?=\n\n)"
)
# of each block the request that has it, + if sequences share it, ! if it was copied or swapped
# just now, * if it is free, but can be found; then the requests that run, and that do not
EXPECTED = {
    ("prefix_hit", 5): ("A+ A+ A A B . . .", "AB", ""),
    ("prefix_hit", 13): ("C C * * * C * .", "C", ""),
    ("static_batching", 15): ("A A A * * * * * * * * * * A * A * . A" + 21 * " .", "A", "EFGH"),
    ("continuous_batching", 9): (
        "A A A * * C C C D D D * C A D A C D E E E" + 19 * " .",
        "ACDE",
        "FGH",
    ),
    ("first_come", 23): ("A A A A A A A A" + 16 * " .", "A", "BCDEF"),
    ("shortest_first", 27): (14 * "* " + "A A A" + 7 * " .", "A", ""),
    ("preemption_recompute", 23): (
        "A A A B B A B C C C . . . C A B . C A B . C A B . C A B",
        "ABC",
        "D",
    ),
    ("preemption_swap", 23): (
        "A A A B B A B C C C . . . C A B . C A B . C A B . C A B",
        "ABC",
        "D",
    ),
    ("copy_on_write", 2): ("A+ A A! A!" + 12 * " .", "A", ""),
    ("beam_search", 19): ("A+ A+ . A+ . A+ A+ . . A+ A+ . . A+ A+ . . A+ A+" + 25 * " .", "A", ""),
}


def texts() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in TUTORIALS.glob("[0-9]*.md")}


def test_each_link_is_a_paragraph_and_names_a_step_that_exists():
    found = set()
    for chapter, text in texts().items():
        links = PARAGRAPH.findall(text)
        assert len(links) == len(LINK.findall(text)), f"{chapter}: a link is no paragraph"
        for said, name, step in links:
            assert said == step, f"{chapter}: {name}"
            assert run_named(name)["frames"][int(step) - 1]["step"] == int(step)
            found.add((name, int(step)))
    assert found == EXPECTED.keys()


def waits(name: str) -> float:
    """The mean number of steps before a request runs."""
    run = run_named(name)
    begun: dict[str, int] = {}
    for i, frame in enumerate(run["frames"]):
        for request in [*frame["running"], *frame["ended"]]:
            begun.setdefault(request, i)
    return sum(begun.values()) / len(run["prompts"])


def test_the_numbers_that_chapters_say_of_runs():
    scheduler = texts()["03_scheduler"]
    assert (waits("first_come"), waits("shortest_first")) == (28, 11)
    assert "the six requests wait 28 steps on average" in scheduler
    assert "Shortest first: 11 steps on average, and A begins in step 27" in scheduler
    lengths = [len(run_named(f"{kind}_batching")["frames"]) for kind in ("continuous", "static")]
    assert "All eight requests end after {} steps, not {}.".format(*lengths) in scheduler
    eighth = run_named("continuous_batching")["frames"][7]
    assert eighth["ended"] == ["1"] and "4" not in eighth["running"]  # B has ended, E still waits

    first, last = (run_named("preemption_recompute")["frames"][step - 1] for step in (22, 39))
    assert first["kv_blocks_used"] == first["kv_blocks"] == 28 and not first["preempted"]
    out, back = (run_named("preemption_swap")["frames"][step - 1]["moves"] for step in (23, 39))
    assert len(out["out"]) == len(back["in"]) == 6
    assert sorted(host for _, host in out["out"]) == sorted(host for host, _ in back["in"])


# --- in a browser ---

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
BLOCKS = """(id) => [...document.querySelector('nano-run').$(id).children].map((cell) => {
    const has = (name) => cell.classList.contains(name);
    return (cell.textContent || (has('cached') ? '*' : '.')) + (has('shared') ? '+' : '') + (has('moved') ? '!' : '');
}).join(' ')"""
TAGS = """(is) => [...document.querySelector('nano-run').$('queues').querySelectorAll(`:scope > ${is} .tag`)]
    .map((tag) => tag.textContent).sort().join('')"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    yield from opened(tmp_path_factory)


def plain_page(folder: Path, name: str, step: int) -> str:
    """A page without a server, that has the player, its style sheet and a run."""
    for file in ("player.js", "player.css"):
        shutil.copy(PAGE / file, folder)
    run = json.dumps(run_named(name)).replace("</", "<\\/")
    inside = f"<script type='application/json'>{run}</script>"
    page = folder / "page.html"
    page.write_text(
        "<!doctype html><meta charset='utf-8'><script src='player.js' defer></script>"
        f"<nano-run step='{step}'>{inside}</nano-run>",
        encoding="utf-8",
    )
    return page.as_uri()


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("name", "step"), EXPECTED)
def test_what_a_chapter_says_of_a_step_is_shown(browser, tmp_path, name, step):
    browser.errors.clear()
    browser.open(plain_page(tmp_path, name, step - 1), width=760)
    # it draws blocks when it has a width
    browser.wait("document.querySelector('nano-run').$('blocks').children.length")
    assert browser.text("#title") == run_named(name)["title"]
    browser.click("#next")
    assert browser.text("#position") == f"step {step} of {len(run_named(name)['frames'])}"
    blocks, running, others = EXPECTED[name, step]
    assert browser.value(f"({BLOCKS})('blocks')") == blocks
    assert browser.value(f"({TAGS})('.running')") == running
    assert browser.value(f"({TAGS})(':not(.running)')") == others
    if name == "preemption_swap":  # 30 on the host, the last one first
        assert browser.value(f"({BLOCKS})('host-blocks')").split().count("D!") == 6
    assert browser.errors == []
