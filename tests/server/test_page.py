"""The page in a real browser, against a server without an engine: the chat, the live view, recorded runs. All of them
are slow; they need a Chromium.

Run: pytest tests/server/test_page.py --slow [-k stop]
To see it: SHOTS=some/folder pytest tests/server/test_page.py --slow -k pictures
"""

import json
import os
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from page_server import PAGE, FakeServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no Chromium (Debian's package: chromium)"
    ),
]
LETTERS = "[...document.querySelectorAll('#blocks .cell')].map((cell) => cell.textContent)"
IS_CONNECTED = "document.querySelector('#connection').textContent === 'Connected'"
IS_LIVE = f"{IS_CONNECTED} && view.frame !== null"
HAS_NOTE = "[...document.querySelectorAll('.note')].at(-1)?.textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def server(browser):
    server = FakeServer()
    browser.errors.clear()
    yield server
    browser.call("Page.navigate", url="about:blank")
    server.shutdown()
    server.server_close()


def run_named(name: str) -> dict:
    return json.loads((PAGE / "runs" / f"{name}.json").read_text())


def ask(browser: Browser, question: str) -> None:
    browser.click("#question")
    browser.write(question)
    browser.press("Enter")


def answer_to(browser: Browser, question: str) -> str:
    num_before = browser.value("document.querySelectorAll('.message').length")
    ask(browser, question)
    browser.wait(f"document.querySelectorAll('.message').length === {num_before + 2}")
    browser.wait(HAS_NOTE)
    return browser.value("[...document.querySelectorAll('.assistant .text')].at(-1).textContent")


def choose_run(browser: Browser, name: str) -> None:
    browser.click("input[value=recorded]")
    browser.wait("player.run !== null")
    browser.value(
        f"player.run = null; $('run').value = '{name}.json'; $('run').dispatchEvent(new Event('change'))"
    )
    browser.wait(f"player.run?.title === {json.dumps(run_named(name)['title'])}")


# --- chat ---


def test_a_question_is_answered(browser, server):
    server.answer = [{"content": "347 + 285"}, {"content": " = 632"}]
    browser.open(server.url)
    browser.wait("document.querySelector('#model').textContent === 'tiny-qwen3'")
    assert answer_to(browser, "what is 347 + 285?") == "347 + 285 = 632"
    (body,) = server.bodies
    assert body["model"] == "tiny-qwen3" and body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    question = {"role": "user", "content": "what is 347 + 285?"}
    assert body["messages"] == [question]
    assert "temperature" not in body and "seed" not in body
    summary = browser.value(HAS_NOTE)
    assert summary.startswith("8 tokens") and "tokens/s" in summary
    assert "16 of 21 prompt tokens cached" in summary
    answer_to(browser, "and now?")
    answer = {"role": "assistant", "content": "347 + 285 = 632"}
    again = {"role": "user", "content": "and now?"}
    assert server.bodies[1]["messages"] == [question, answer, again]
    browser.click("#new-chat")
    assert browser.value("document.querySelectorAll('.message').length") == 0
    answer_to(browser, "hello")
    assert server.bodies[2]["messages"] == [{"role": "user", "content": "hello"}]
    assert browser.errors == []


def test_sampling_options_are_sent(browser, server):
    browser.open(server.url)
    browser.click("#options summary")
    for name, text in {
        "temperature": "0.7",
        "top_p": "0.9",
        "max_tokens": "50",
        "seed": "3",
    }.items():
        browser.click(f"#options input[name={name}]")
        browser.write(text)
    answer_to(browser, "hello")
    body = server.bodies[0]
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (
        0.7,
        0.9,
        50,
        3,
    )


def test_stop_stops(browser, server):
    server.is_endless = True
    browser.open(server.url)
    ask(browser, "tell me a story")
    browser.wait("document.querySelector('.assistant .text')?.textContent.includes('more')")
    assert browser.value("$('send').hidden && !$('stop').hidden")
    browser.click("#stop")
    assert server.has_left.wait(60)
    assert browser.wait(HAS_NOTE) == "Stopped."
    assert browser.value("!$('send').hidden && $('stop').hidden")
    server.is_endless = False
    partial = browser.text(".assistant .text")
    answer_to(browser, "go on")
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": partial}


def test_a_new_chat_stops_the_old_answer(browser, server):
    server.is_endless = True
    browser.open(server.url)
    ask(browser, "tell me a story")
    browser.wait("document.querySelector('.assistant .text')?.textContent.includes('more')")
    browser.click("#new-chat")
    assert server.has_left.wait(60)
    browser.wait("chat.controller === null")
    server.is_endless = False
    assert answer_to(browser, "hello") == "Hello"
    assert len(server.bodies[1]["messages"]) == 1


def test_an_answer_is_text_and_never_markup(browser, server):
    text = "a <b>bold</b> <img src=x onerror=alert(1)> claim"
    server.answer = [{"reasoning": "<i>so</i>"}, {"content": text[:5]}, {"content": text[5:]}]
    browser.open(server.url)
    assert answer_to(browser, "<u>why</u>") == text
    assert browser.text(".user .text") == "<u>why</u>"
    assert browser.text(".assistant details div") == "<i>so</i>"
    assert browser.value("document.querySelectorAll('#log :is(b, i, u, img)').length") == 0
    assert not browser.value("document.querySelector('.assistant details').open")
    assert browser.errors == []


def test_an_error_is_a_sentence(browser, server):
    server.answer = (400, "temperature=9 is too hot")
    browser.open(server.url)
    answer_to(browser, "hello")
    assert browser.value(HAS_NOTE) == "temperature=9 is too hot"
    assert browser.value("$('question').value") == "hello"
    server.answer = [{"content": "Hi"}]
    browser.value("$('question').value = ''")
    assert answer_to(browser, "hello") == "Hi"
    assert len(server.bodies[1]["messages"]) == 1


def test_nothing_moves_while_an_answer_comes(browser, server):
    boxes = (
        "['composer', 'blocks', 'queues', 'numbers'].map((id) => $(id).getBoundingClientRect().top)"
    )
    server.is_endless = True
    server.last_frame = run_named("shared_prefix")["frames"][4]
    browser.open(server.url)
    browser.wait(IS_LIVE)
    before = browser.value(boxes)
    ask(browser, "tell me a story")
    browser.wait("document.querySelector('.assistant .text')?.textContent.length > 500")
    assert browser.value(boxes) == before
    server.is_endless = False


# --- live ---


def test_blocks_appear_and_disappear(browser, server):
    frames = run_named("shared_prefix")["frames"]
    browser.open(server.url)
    browser.wait(IS_CONNECTED)
    for frame in (frames[0], frames[10], frames[-1]):
        server.send_frame(frame)
        browser.wait(f"view.frame?.step === {frame['step']}")
        expected = []
        for run in frame["blocks"]:
            expected += [run[1] if isinstance(run[1], str) else run[2]] * run[0]
        letters = browser.value(LETTERS)
        assert [letter != "" for letter in letters] == [not isinstance(e, str) for e in expected]
        for name, is_so in (
            ("shared", lambda e: e not in ("empty", "cached", 1)),
            ("cached", lambda e: e == "cached"),
        ):
            marked = browser.value(f"view.cells.map((cell) => cell.classList.contains('{name}'))")
            assert marked == [is_so(e) for e in expected], name
    assert browser.errors == []


def test_a_copy_is_marked_and_told_in_words(browser, server):
    frames = run_named("shared_prefix")["frames"]
    frame = next(frame for frame in frames if frame["moves"]["copies"])
    (source, target), *_ = frame["moves"]["copies"]
    server.last_frame = frame
    browser.open(server.url)
    browser.wait(IS_LIVE)
    assert browser.value(f"view.cells[{target}].classList.contains('moved')")
    browser.hover(f"#blocks .cell:nth-child({target + 1})")
    words = browser.wait("$('words').textContent.startsWith('Block') && $('words').textContent")
    assert words.startswith(f"Block {target}: request A (0)")
    assert f"copied from block {source} just now" in words
    browser.value("$('blocks').focus()")
    browser.press("End")
    browser.press("ArrowLeft")
    last = frame["kv_blocks"] - 2
    assert browser.text("#words") == f"Block {last}: free and empty."


def test_queues_say_who_runs_and_who_waits(browser, server):
    frames = run_named("preemption_swap")["frames"]
    frame = next(f for f in frames if {"swapped", "running"} <= {r["state"] for r in f["requests"]})
    server.last_frame = frame
    browser.open(server.url)
    browser.wait(IS_LIVE)
    counts = browser.value(
        "[...document.querySelectorAll('#queues h3 small')].map((e) => e.textContent)"
    )
    states = [request["state"] for request in frame["requests"]]
    assert counts == [str(states.count(state)) for state in ("running", "swapped", "waiting")]
    assert browser.value("document.querySelectorAll('.request').length") == len(states)


def test_a_large_cache_is_drawn_where_it_is_used(browser, server):
    frame = run_named("shared_prefix")["frames"][10]
    used = frame["blocks"][:-1]
    num_used = sum(run[0] for run in used)
    few = frame | {"kv_blocks": 26_000, "blocks": [*used, [26_000 - num_used, "empty"]]}
    cached = [9000, "cached"]
    many = few | {"blocks": [*used, cached, [17_000 - num_used, "empty"]], "step": 999}
    browser.open(server.url)
    browser.wait(IS_CONNECTED)
    server.send_frame(few)
    browser.wait("view.frame !== null")
    assert browser.value("view.cells.length") == 256
    assert "25,744 more" in browser.text("#size")
    server.send_frame(many)
    browser.wait("view.frame.step === 999")
    assert browser.value("view.cells.length") == 0
    assert browser.value("document.querySelector('#blocks canvas').width") > 300
    browser.value("$('blocks').focus()")
    browser.press("ArrowRight")
    assert browser.text("#words").startswith("Block 1: request A")
    assert browser.errors == []


def test_nobody_reads_frames_while_a_recorded_run_plays(browser, server):
    browser.open(server.url)
    browser.wait(IS_CONNECTED)
    choose_run(browser, "beam_search")
    assert browser.value("live.source === null")
    browser.click("input[value=live]")
    browser.wait(IS_CONNECTED)


# --- recorded runs ---


def test_a_recorded_run_plays(browser, server):
    browser.open(server.url)
    choose_run(browser, "preemption_recompute")
    run = run_named("preemption_recompute")
    count = len(run["frames"])
    assert browser.text("#explanation") == run["explanation"]
    assert browser.text("#position") == f"step 1 of {count}"
    browser.click("#next")
    browser.press("ArrowRight")
    assert browser.text("#position") == f"step 3 of {count}"
    browser.press("ArrowLeft")
    browser.click("#previous")
    assert browser.text("#position") == f"step 1 of {count}"
    browser.value("$('slider').focus()")
    browser.press("ArrowRight")
    assert browser.text("#position") == f"step 2 of {count}"
    browser.press("End")
    assert browser.text("#position") == f"step {count} of {count}"
    assert set(browser.value(LETTERS)) == {""}
    browser.click("#play")  # from the start again
    browser.wait("player.i >= 2")
    assert browser.text("#play") == "Pause"
    browser.click("#play")
    i = browser.value("player.i")
    frame = run["frames"][i]
    num_owned = sum(block[0] for block in frame["blocks"] if not isinstance(block[1], str))
    assert sum(letter != "" for letter in browser.value(LETTERS)) == num_owned
    assert browser.errors == []


def test_every_recorded_run_can_be_chosen(browser, server):
    browser.open(server.url)
    index = json.loads((PAGE / "runs" / "index.json").read_text())
    for entry in index:
        choose_run(browser, Path(entry["file"]).stem)
        browser.value("goTo(player.run.frames.length / 2 | 0)")
    titles = browser.value("[...$('run').options].map((option) => option.text)")
    assert titles == [entry["title"] for entry in index]
    assert browser.errors == []


def test_without_a_live_view_recorded_runs_are_offered(browser, server, monkeypatch):
    monkeypatch.setattr(
        "page_server.Handler._live", lambda self: self._send(404, "text/plain", b"")
    )
    browser.open(server.url)
    browser.wait("player.run !== null")
    assert browser.text("#connection") == "This server has no live view"


def test_opened_as_a_file_it_asks_for_a_run(browser):
    browser.errors.clear()
    browser.open((PAGE / "index.html").as_uri())
    browser.wait("!$('player').hidden")
    assert browser.text("#model") == "no server"
    root = browser.call("DOM.getDocument")["root"]["nodeId"]
    node = browser.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    bad = str(PAGE / "runs" / "index.json")
    browser.call("DOM.setFileInputFiles", nodeId=node, files=[bad])
    browser.wait(
        "$('explanation').textContent === 'index.json is not a recorded run: it has no frames.'"
    )
    browser.call(
        "DOM.setFileInputFiles", nodeId=node, files=[str(PAGE / "runs" / "beam_search.json")]
    )
    browser.wait("player.run?.title === 'Beam search'")
    browser.click("#next")
    assert browser.text("#position").startswith("step 2 of ")
    assert browser.errors == []


# --- how it looks ---


def has_no_overflow(browser: Browser, width: int) -> bool:
    return browser.value("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_on_a_telephone(browser, server, scheme):
    server.answer = [{"content": "x" * 500 + " " + "word " * 50}]
    server.last_frame = run_named("preemption_swap")["frames"][40]
    browser.open(server.url, width=360, height=740, scheme=scheme)
    browser.wait(IS_LIVE)
    answer_to(browser, "y" * 300)
    browser.click("#options summary")
    assert has_no_overflow(browser, 360)
    for entry in json.loads((PAGE / "runs" / "index.json").read_text()):
        choose_run(browser, Path(entry["file"]).stem)
        browser.value("goTo(player.run.frames.length / 2 | 0)")
        assert has_no_overflow(browser, 360)
    assert browser.errors == []


def test_a_large_screen_scrolls_only_within_the_columns(browser, server):
    server.last_frame = run_named("static_batching")["frames"][3]
    browser.open(server.url, height=600)
    browser.wait(IS_LIVE)
    for _ in range(8):
        answer_to(browser, "hello")
    assert browser.value("document.documentElement.scrollHeight") <= 600
    assert browser.value("$('log').scrollHeight > $('log').clientHeight")
    assert browser.value(
        "Math.abs($('log').scrollTop + $('log').clientHeight - $('log').scrollHeight) < 2"
    )


def test_everything_can_be_reached_with_the_keyboard_and_has_a_name(browser, server):
    browser.open(server.url)
    choose_run(browser, "beam_search")
    unnamed = """[...document.querySelectorAll('button, input, select, textarea')].filter((e) =>
        !e.labels?.length && !e.textContent.trim() && !e.getAttribute('aria-label')).map((e) => e.outerHTML)"""
    assert browser.value(unnamed) == []
    browser.value("document.activeElement.blur()")
    reached = set()
    for _ in range(30):
        browser.press("Tab")
        reached.add(browser.value("document.activeElement.id"))
    expected = {"new-chat", "log", "question", "send", "run", "file", "play", "previous", "next"}
    assert expected | {"slider", "blocks"} <= reached


def test_pictures_can_be_taken(browser, server, tmp_path):
    """For people to look at, light and dark; the recorded one is in tutorials/figures, too."""
    folder = Path(os.environ.get("SHOTS", tmp_path))
    server.answer = [
        {"content": "Once upon a time there was a shy fox named Luna who lived on a green hill."}
    ]
    for scheme in ("light", "dark"):
        browser.open(server.url, height=820, scheme=scheme)
        browser.wait(IS_CONNECTED)
        answer_to(browser, "tell me a story about a shy fox")
        server.answer = [{"content": "347 + 285 = 632"}]
        answer_to(browser, "what is 347 + 285?")
        for frame in run_named("shared_prefix")["frames"][:13]:
            server.send_frame(frame)
            browser.wait(f"view.frame?.step === {frame['step']}")
        browser.screenshot(folder / f"page_live_{scheme}.png")
        server.last_frame = None
        browser.open(server.url, height=950, scheme=scheme)
        choose_run(browser, "preemption_recompute")
        browser.value("goTo(29); document.querySelector('.view').scrollTop = 0")
        browser.screenshot(folder / f"page_recorded_{scheme}.png")
        browser.open(server.url, width=360, height=740, scheme=scheme)
        choose_run(browser, "continuous_batching")
        browser.value("goTo(20); document.querySelector('.view').scrollIntoView()")
        browser.screenshot(folder / f"page_360_{scheme}.png")
    names = {
        f"page_{what}_{scheme}.png"
        for what in ("live", "recorded", "360")
        for scheme in ("light", "dark")
    }
    assert names <= {path.name for path in folder.glob("*.png")}
