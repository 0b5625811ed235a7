"""The element <nano-run> where it is not the page of the server: in chapters, several on a page. All of them are slow;
they need a Chromium. What chapters say of runs is in tests/tutorials/test_runs.py.

Run: pytest tests/server/test_player.py --slow
"""

import json

import pytest
from browser import Browser
from page_server import FakeServer

pytestmark = pytest.mark.slow


PLACE = """
    const runs = document.getElementsByTagName('nano-run');
    function place(attributes) {
      const made = document.createElement('nano-run');
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      document.body.append(made);
    }
"""


@pytest.fixture(scope="module")
def address():
    """Of a page with a sentence, beside the player and the runs."""
    with FakeServer() as server:
        yield f"{server.url}sentence"
        server.shutdown()


@pytest.fixture
def chapter(browser, address):
    browser.errors.clear()
    browser.open(address)
    browser.value(PLACE)
    return browser


def place(browser: Browser, i: int, name: str, **attributes) -> None:
    browser.value(f"place({json.dumps({'src': f'runs/{name}.json', **attributes})})")
    browser.wait(f"runs[{i}].frame !== null && runs[{i}].$('all').checkVisibility()")


def test_several_on_a_page_do_not_know_each_other(chapter):
    place(chapter, 0, "prefix_hit", step=5)
    place(chapter, 1, "first_come")
    assert chapter.value("[...runs].map((run) => run.i)") == [4, 0]
    chapter.click("#next")
    chapter.press("ArrowRight")
    chapter.press(" ")  # the button has the focus
    assert chapter.value("[...runs].map((run) => run.i)") == [7, 0]
    chapter.value("document.activeElement.blur()")
    chapter.press("ArrowRight")
    assert chapter.value("[...runs].map((run) => run.i)") == [7, 0]
    letters = "[...runs].map((run) => run.kv.cells.map((cell) => cell.textContent).join(''))"
    assert chapter.value(letters) == ["BBBB", "AAA"]
    assert chapter.errors == []


def test_the_time_line_says_who_runs_and_who_waits(chapter):
    place(chapter, 0, "preemption_swap", step=23)
    lines = chapter.value(
        "[...runs[0].$('timeline').querySelectorAll('.line')].map((e) => e.title)"
    )
    assert lines[0] == "running in steps 1 to 36"
    assert lines[2] == (
        "running in steps 5 to 31, swapped in steps 32 to 36, running in steps 37 to 45"
    )
    place(chapter, 1, "shortest_first")
    lines = chapter.value(
        "[...runs[1].$('timeline').querySelectorAll('.line')].map((e) => e.title)"
    )
    assert lines[0] == "waiting in steps 1 to 26, running in steps 27 to 50"
    box = "(e) => e.getBoundingClientRect()"
    now, part = chapter.value(
        f"['#timeline .now', '#timeline .swapped'].map((name) => runs[0].shadowRoot.querySelector(name)).map({box}).map((b) => [b.left, b.right])"
    )
    assert now[0] < part[0]  # C is swapped out later
    chapter.value("runs[0].goTo(33)")
    now = chapter.value(f"({box})(runs[0].shadowRoot.querySelector('#timeline .now')).left")
    assert part[0] < now < part[1]


def test_each_step_has_a_sentence_and_events_are_found(chapter):
    place(chapter, 0, "preemption_recompute", step=22)
    told = "document.querySelector('nano-run').$('told').textContent"
    assert chapter.value(told) == "Step 22: A, B, C and D get a token each."
    chapter.click("#next-event")
    assert "D finds no free block, loses 6 blocks and will be computed" in chapter.value(told)
    chapter.click("#previous-event")
    assert chapter.value(told).startswith("Step 7: D is admitted and computes its 9 prompt tokens")
    place(chapter, 1, "prefix_hit", step=5)
    assert "8 tokens of B are found in the prefix cache" in chapter.value("runs[1].told[4].text")
    levels = "[...runs[0].shadowRoot.querySelectorAll('h3, h4')].map((one) => one.ariaLevel)"
    assert {*chapter.value(levels)} == {"2", "3"}  # no heading stands before it
    assert chapter.errors == []
