"""The page in a real browser, against a server without an engine: the chat, the live view, recorded runs. All of them
are slow; they need a Chromium.

Run: pytest tests/server/test_page.py --slow [-k stop]
"""

import json
import re
from pathlib import Path

import pytest
from browser import Browser
from frames import Reader, blocks_of, states_of
from page_server import PAGE, FakeServer, run_named

pytestmark = pytest.mark.slow
LETTERS = "[...view.shadowRoot.querySelectorAll('#blocks .cell')].map((cell) => cell.textContent)"
# the view is hidden until it has its style, and draws blocks when it has a width
IS_CONNECTED = "document.querySelector('#connection').textContent === 'Connected' && view.$('all').checkVisibility()"
IS_LIVE = f"{IS_CONNECTED} && view.frame !== null && view.$('blocks').children.length > 0"
TEXTS = "[...document.querySelectorAll('.message .text')].map((one) => one.textContent)"
HAS_NOTE = "[...document.querySelectorAll('.note')].at(-1)?.textContent"


@pytest.fixture
def server(browser):
    with FakeServer() as server:
        browser.errors.clear()
        yield server
        browser.call("Page.navigate", url="about:blank")
        server.shutdown()


def frame_of(running: list[str], queue: list[str], **more) -> dict:
    """Of a small cache; each request that runs has a block."""
    frame = run_named("continuous_batching")["frames"][0]
    tables = [[name, 0, 0, [i]] for i, name in enumerate(running)]
    counts = {"prompt": 15, "output": 48, "computed": 62, "sequences": 1}
    rows = [{"id": name, **counts} for name in [*running, *queue][:20]]
    own = {"running": running, "queue": queue, "requests": rows, "tables": tables, "step": 1000}
    none = {"preempted": [], "swapped": [], "ended": [], "host_tables": []}
    return frame | none | own | more


def show_frame(browser: Browser, server: FakeServer, frame: dict) -> None:
    server.send_frame(frame)
    browser.wait(f"view.frame?.step === {frame['step']}")


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
    browser.wait("view.run !== null")
    browser.value(
        f"view.run = null; $('run').value = '{name}.json'; $('run').dispatchEvent(new Event('change'))"
    )
    browser.wait(f"view.run?.title === {json.dumps(run_named(name)['title'])}")
    browser.wait("view.$('blocks').children.length")


def test_a_question_is_answered(browser, server):
    server.answer = [{"content": "347 + 285"}, {"content": " = 632"}]
    browser.open(server.url)
    browser.wait("document.querySelector('#model').textContent === 'tiny-qwen3'")
    assert answer_to(browser, "what is 347 + 285?") == "347 + 285 = 632"
    (body,) = server.bodies
    assert body["model"] == "tiny-qwen3" and body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    question = {"role": "user", "content": "what is 347 + 285?"}
    assert body["messages"] == [question]
    assert "temperature" not in body and "seed" not in body
    summary = browser.value(HAS_NOTE)
    assert re.match(r"8 tokens . the first after [\d.]+ s . then [\d,]+ tokens/s", summary)
    assert "16 of 21 prompt tokens cached" in summary
    browser.open(server.url)  # this tab keeps the conversation
    assert browser.value(TEXTS) == ["what is 347 + 285?", "347 + 285 = 632"]
    assert browser.value(HAS_NOTE) == summary
    answer_to(browser, "and now?")
    answer = {"role": "assistant", "content": "347 + 285 = 632"}
    again = {"role": "user", "content": "and now?"}
    assert server.bodies[1]["messages"] == [question, answer, again]
    browser.click("#new-chat")
    browser.open(server.url)
    assert browser.value(TEXTS) == []
    answer_to(browser, "hello")
    assert server.bodies[2]["messages"] == [{"role": "user", "content": "hello"}]
    assert browser.errors == []


SEVERAL = "[...document.querySelectorAll('.several')].map((one) => [one.textContent, one.title])"


def test_what_several_tokens_of_a_step_say_is_marked(browser, server):
    """If the engine guesses. A character may need several tokens, too."""
    server.answer = [{"content": "12"}, {"content": ", 31"}, {"content": ","}]
    server.counts = [2, 6, 7]
    server.last_frame = frame_of([], [])
    browser.open(server.url)
    browser.wait(IS_LIVE)
    assert answer_to(browser, "sort 31, 12") == "12, 31,"
    assert browser.value(SEVERAL) == []
    drafts = {"step": 1001, "draft_tokens": 9, "accepted_draft_tokens": 4}
    show_frame(browser, server, server.last_frame | drafts)
    assert answer_to(browser, "sort 31, 12") == "12, 31,"
    marked = [["12", "2 tokens in one step"], [", 31", "4 tokens in one step"]]
    assert browser.value(SEVERAL) == marked
    assert browser.errors == []


def test_sampling_options_are_sent(browser, server):
    browser.open(server.url)
    browser.click("#options summary")
    options = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 50, "seed": 3}
    for name, value in options.items():
        browser.click(f"#options input[name={name}]")
        browser.write(str(value))
    answer_to(browser, "hello")
    assert server.bodies[0].items() >= options.items()


@pytest.mark.parametrize("key", ["", "Escape"])
def test_stop_stops(browser, server, key):
    server.is_endless = True
    browser.open(server.url)
    browser.click("#question")
    browser.write("tell me a story")
    browser.click("#send")
    assert browser.value("document.activeElement.id") == "question"  # the button is hidden now
    browser.wait("document.querySelector('.assistant .text')?.textContent.includes('more')")
    assert browser.value("$('send').hidden && !$('stop').hidden")
    browser.press("Enter")
    assert "Escape" in browser.value("$('question').validationMessage")
    if key == "Escape":
        browser.press("Escape")
    else:
        browser.click("#stop")
    assert server.has_left.wait(60)
    assert browser.wait(HAS_NOTE) == "Stopped."
    assert browser.value("!$('send').hidden && $('stop').hidden")
    server.is_endless = False
    partial = browser.text(".assistant .text")
    answer_to(browser, "go on")
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": partial}


def test_a_page_that_is_left_in_an_answer_says_so(browser, server):
    """The call ends because the page is left, and not because the server is gone."""
    server.is_endless = True
    browser.open(server.url)
    ask(browser, "tell me a story")
    browser.wait("document.querySelector('.assistant .text')?.textContent.includes('more')")
    browser.call("Page.reload")
    browser.wait(
        "document.readyState === 'complete' && document.querySelector('.assistant') !== null"
    )
    assert browser.wait(HAS_NOTE) == "The page was left before the end of the answer."
    assert browser.value("!$('send').hidden")


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
    assert browser.text(".assistant h3") == "Refused"
    assert browser.value("$('question').value") == "hello"
    server.answer = [{"content": "Hi"}]
    browser.value("$('question').value = ''")
    assert answer_to(browser, "hello") == "Hi"
    assert len(server.bodies[1]["messages"]) == 1


# --- keys and connections ---


def test_a_server_with_a_key_is_asked_with_it(browser, server):
    server.key, server.last_frame = "s3cret:\u00fc", frame_of([], [])
    browser.open(server.url)
    for key in ("wrong", server.key):
        browser.wait("$('key-form').checkVisibility()")
        browser.click("#key")
        browser.write(key)
        browser.press("Enter")
        browser.wait(f"$('key-problem').textContent || {IS_LIVE}")
    assert answer_to(browser, "hello") == "Hello"
    browser.open(server.url)  # this tab keeps the key
    browser.wait(IS_LIVE)
    assert browser.value("$('key-form').hidden")


def test_only_the_newest_windows_hold_a_connection(browser, server):
    """A browser has six for all its windows, and a page that waits for one does not load."""
    server.last_frame = frame_of([], [])
    browser.open(server.url)
    browser.wait(IS_LIVE)
    others = "new BroadcastChannel(windows.name).postMessage({id, watches: true})"
    browser.value(f"for (const id of [1, 2, 3]) {others}")
    browser.wait("$('connection').textContent.startsWith('Paused: 3 newer windows')")
    browser.click("#connection")
    browser.wait(IS_LIVE)
    assert browser.errors == []


# --- live ---


def test_queues_say_who_runs_and_who_waits(browser, server):
    frames = run_named("preemption_swap")["frames"]
    frame = next(f for f in frames if {"swapped", "running"} <= {*states_of(f).values()})
    server.last_frame = frame | {"prompt_tokens": 9_999_999, "prefix_cache_hit_tokens": 9_999_999}
    browser.open(server.url)
    browser.wait(IS_LIVE)
    numbers = "[...view.shadowRoot.querySelectorAll('#numbers dd')]"
    assert browser.value(f"{numbers}.every((e) => e.scrollWidth <= e.clientWidth)")
    counts = browser.value(
        "[...view.shadowRoot.querySelectorAll('#queues h4 small')].map((e) => e.textContent)"
    )
    states = [*states_of(frame).values()]
    assert counts == [str(states.count(state)) for state in ("running", "swapped", "waiting")]
    assert browser.value("view.shadowRoot.querySelectorAll('.request').length") == len(states)
    on_top = ("running", "waiting", "preempted", "swapped")
    shown = [browser.text(f"#num-{state}") for state in on_top]
    assert shown == [str(states.count(state)) for state in on_top]


def test_frames_of_changes_make_the_picture(browser, server):
    """As a reader in Python understands them."""
    frames = run_named("preemption_swap")["frames"]
    browser.open(server.url)
    browser.wait(IS_CONNECTED)
    told: dict[str, dict] = {"tables": {}, "host_tables": {}}
    reader = Reader()
    for frame in frames:
        changes = {"is_whole": frame is frames[0]}
        for kind, known in told.items():
            now = {(name, index): blocks for name, index, _, blocks in frame[kind]}
            news = [[name, index, 0, []] for name, index in known.keys() - now.keys()]
            for (name, index), blocks in now.items():
                old = known.get((name, index), [])
                same = next(
                    (i for i, pair in enumerate(zip(old, blocks)) if pair[0] != pair[1]),
                    min(len(old), len(blocks)),
                )
                news.append([name, index, same, blocks[same:]])
            changes[kind] = news
            told[kind] = now
        show_frame(browser, server, frame | changes)
        expected = reader.read(frame | changes)
        for grid, blocks in (
            ("kv", expected.blocks()),
            ("host", expected.host_blocks()[::-1]),  # the last one is used first
        ):
            owners = browser.value(f"view.{grid}.blocks.map((block) => block.id ?? null)")
            assert owners == [said[0] if len(said) == 2 else None for said in blocks]
    assert browser.errors == []


ROWS = "[...document.querySelectorAll('.many summary')].map((e) => [...e.children].map((c) => c.textContent))"


def test_twenty_questions_are_one_call(browser, server):
    server.is_endless = True
    server.answer_id = "cmpl-many"
    browser.open(server.url)
    browser.wait(IS_CONNECTED)
    browser.click("#ask-many")
    browser.wait(f"{ROWS}[0]?.[3].includes('more')")
    (body,) = server.bodies
    assert len(body["prompt"]) == 20 == len({*map(tuple, body["prompt"])})
    assert body["stream"] is True and body["max_tokens"] == 160
    assert browser.value("$('ask-many').disabled && !$('stop').hidden && !$('send').hidden")
    names = [f"cmpl-many-{i}" for i in range(20)]
    show_frame(browser, server, frame_of(names[:12], names[12:]))
    rows = browser.value(ROWS)
    assert [row[0] for row in rows] == browser.value(
        f"{json.dumps(names)}.map((id) => view.owners.get(id).letter)"
    )
    assert [row[2] for row in rows[:12]] == ["running"] * 12
    assert rows[12][2] == "waiting, 1st" and rows[19][2] == "waiting, 8th"
    server.is_endless = False
    browser.wait("!$('ask-many').disabled")
    rows = browser.value(ROWS)
    assert {row[2] for row in rows} == {"ended"}
    assert rows[5][3] == f"{len(body['prompt'][5])}!" and rows[5][1] == "what is 347 + 285?"
    assert browser.wait(HAS_NOTE).startswith("20 answers in ")
    assert not browser.value("document.querySelector('.many .text').checkVisibility()")
    browser.click(".many summary")
    browser.wait("document.querySelector('.many .text').checkVisibility()")
    browser.click(".many .bar button")
    assert browser.value("document.querySelectorAll('.message').length") == 0
    assert browser.value("$('welcome').checkVisibility()")
    answer_to(browser, "hello")
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "hello"}]
    assert browser.errors == []


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
    browser.value("view.$('slider').focus()")
    browser.press("ArrowRight")
    assert browser.text("#position") == f"step 2 of {count}"
    browser.press("End")
    assert browser.text("#position") == f"step {count} of {count}"
    assert set(browser.value(LETTERS)) == {""}
    browser.click("#play")  # from the start again
    browser.wait("view.i >= 2")
    assert browser.text("#play") == "Pause"
    browser.click("#play")
    i = browser.value("view.i")
    frame = run["frames"][i]
    num_owned = sum(len(said) == 2 for said in blocks_of(frame))
    assert sum(letter != "" for letter in browser.value(LETTERS)) == num_owned
    assert browser.errors == []


def test_opened_as_a_file_it_asks_for_a_run(browser):
    browser.errors.clear()
    browser.open((PAGE / "index.html").as_uri())
    browser.wait("!view.$('player').hidden")
    assert browser.text("#model") == "no server"
    root = browser.call("DOM.getDocument")["root"]["nodeId"]
    node = browser.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    bad = str(PAGE / "runs" / "index.json")
    browser.call("DOM.setFileInputFiles", nodeId=node, files=[bad])
    browser.wait(
        "view.$('explanation').textContent === 'index.json is not a recorded run: it has no frames.'"
    )
    browser.call(
        "DOM.setFileInputFiles", nodeId=node, files=[str(PAGE / "runs" / "beam_search.json")]
    )
    browser.wait("view.run?.title === 'Beam search'")
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
    browser.click("#ask-many")
    browser.wait("!$('ask-many').disabled && document.querySelector('.many .note').textContent")
    assert has_no_overflow(browser, 360)
    browser.click("#options summary")
    assert has_no_overflow(browser, 360)
    index = json.loads((PAGE / "runs" / "index.json").read_bytes())
    for entry in index:
        choose_run(browser, Path(entry["file"]).stem)
        browser.value("view.goTo(view.run.frames.length / 2 | 0)")
        assert has_no_overflow(browser, 360)
    titles = browser.value("[...$('run').options].map((option) => option.text)")
    assert titles == [entry["title"] for entry in index]
    assert browser.errors == []


def test_everything_can_be_reached_with_the_keyboard_and_has_a_name(browser, server):
    browser.open(server.url)
    choose_run(browser, "beam_search")
    unnamed = """[document, view.shadowRoot].flatMap((root) => [...root.querySelectorAll('button, input, select, textarea')]).filter((e) =>
        !e.labels?.length && !e.textContent.trim() && !e.getAttribute('aria-label')).map((e) => e.outerHTML)"""
    assert browser.value(unnamed) == []
    browser.value("document.activeElement.blur()")
    reached = set()
    for _ in range(30):
        browser.press("Tab")
        reached.add(
            browser.value("(document.activeElement.shadowRoot ?? document).activeElement.id")
        )
    expected = "ask-many new-chat log question send run file play previous next next-event slider"
    assert {*expected.split(), "blocks"} <= reached
