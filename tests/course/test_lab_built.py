"""The lab as it is built: in Chromium a scheduler is typed, run and stopped. All of them are slow; they need npm, and most
a Chromium.

Run: pytest tests/course/test_lab_built.py --slow [-k stop]
"""

import json
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import Browser, opened
from submissions import SHORTEST_FIRST, method

from tutorials.lab import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, ("npm", "node"))),
        reason="there is no npm (it comes with Node.js)",
    ),
]
ENDLESS = method("while True: pass", "priority", ", request")
STATUS = "document.querySelector('#status').textContent"
TEXT = "[...document.querySelectorAll('.cm-line')].map((line) => line.textContent).join('\\n')"
DONE = f"{STATUS}.startsWith('Done')"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build.build_lab(folder)
    (folder / "favicon.ico").touch()  # asked for by a page of text
    return folder


def test_what_is_built_needs_no_network(site):
    for path in [site / "lab.html", site / "lab" / "lab.css", site / "lab" / "player.css"]:
        text = path.read_text(encoding="utf-8")
        assert "http://" not in text and "https://" not in text
    licenses = (site / "lab" / "licenses.txt").read_text(encoding="utf-8")
    assert "pyodide 314" in licenses and "codemirror 6" in licenses and "MIT" in licenses


# --- in a browser ---


class Counted(SimpleHTTPRequestHandler):
    """Notes what was asked for, and says nothing."""

    paths: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.paths.append(self.path)
        super().do_GET()

    def log_message(self, *_) -> None:
        pass


@pytest.fixture(scope="module")
def address(site):
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Counted, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        yield f"http://127.0.0.1:{server.server_port}/lab.html"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    yield from opened(tmp_path_factory)


@pytest.fixture
def browser(chromium, address):
    """With a page that remembers nothing."""
    chromium.open(address.replace("lab.html", "lab/licenses.txt"))
    chromium.value("sessionStorage.clear(); localStorage.clear()")
    chromium.errors.clear()
    return chromium


def open_lab(browser: Browser, address: str, sheet: str = "a1", **options) -> None:
    browser.open("about:blank")
    browser.open(f"{address}#{sheet}", **options)
    browser.wait("document.body?.dataset.ready")
    browser.wait(DONE if sheet in ("budget", "order", "blocks") else f"{STATUS} === 'Ready.'")


def type_file(browser: Browser, text: str) -> None:
    browser.value(
        "document.querySelector('.cm-content').focus(); document.execCommand('selectAll')"
    )
    browser.write(text)
    browser.wait(f"{TEXT} === {json.dumps(text)}")


def run(browser: Browser, button: str = "#run") -> None:
    browser.click(button)
    browser.wait(DONE)


def cells(browser: Browser) -> dict[str, list[str]]:
    rows = browser.value(
        "[...document.querySelectorAll('.metrics tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return {name: values for name, *values in rows}


def test_a_scheduler_is_typed_run_and_played(browser, address):
    open_lab(browser, address)
    type_file(browser, SHORTEST_FIRST)
    run(browser)
    found = cells(browser)
    assert found["number"] == ["FCFS", "MyScheduler", "compared"]
    assert found["TTFT, p50 (s)"] == ["2.433", "0.065", "better"]  # as the handout of a1 has it
    assert found["TTFT, p99 (s)"][2] == "worse" and found["requests"][2] == "same"
    said = browser.value("document.querySelector('#results').innerText")
    assert said.startswith("Goals of this run: chats, seed 1\n30 of 30 points: the goal is reached")
    assert "40 of 500 requests: where the queue is longest" in said
    assert browser.value("document.querySelectorAll('.times g').length") == 80
    assert browser.value("document.querySelectorAll('.times .waits').length") > 0
    count = browser.value("document.querySelector('nano-run').run.frames.length")
    assert count > 50
    browser.value("document.querySelector('nano-run').goTo(40)")
    assert browser.value("document.querySelector('nano-run').frame.kv_blocks_used") > 0
    assert browser.errors == []


def test_an_endless_loop_is_stopped_and_a_warm_worker_takes_its_place(browser, address):
    """More often than there were warm ones: a new one needs nothing from the server."""
    open_lab(browser, address)
    Counted.paths.clear()
    for _ in range(3):
        type_file(browser, ENDLESS)
        browser.click("#run")
        browser.wait("!document.querySelector('#stop').disabled")
        assert browser.value("document.querySelector('#run').disabled")
        browser.click("#stop")
        browser.wait(f"{STATUS} === 'Stopped.'")
        assert browser.text("#results") == ""  # those of the run before are gone
        type_file(browser, SHORTEST_FIRST)
        run(browser)
        assert cells(browser)["requests"] == ["500", "500", "same"]
    assert browser.errors == [] == Counted.paths


# --- security ---

REACH = """import js

def attempt(work):
    try:
        return work()
    except BaseException as error:
        return type(error).__name__

def ask():
    request = js.XMLHttpRequest.new()
    request.open("GET", js.location.origin + "/stolen", False)
    request.send()
    return request.status

print(attempt(ask))
print(attempt(lambda: js.WebSocket.new("wss://example.org")))
print(attempt(lambda: js.eval("import('/stolen')")))
print(attempt(lambda: js.Function.new("return import('/stolen')")()))
print(attempt(lambda: js.Worker.new(js.location.origin + "/stolen")))
print(attempt(lambda: js.navigator.sendBeacon(js.location.origin + "/stolen", "all")))
forged = {"answer": '{"total": 90, "most": 90, "done": true}', "id": "1"}
js.postMessage(js.Object.fromEntries([[key, value] for key, value in forged.items()]))
raise ValueError("the end")
"""


def test_a_file_reaches_no_network(browser, address):
    """Not even the server that the page came from."""
    open_lab(browser, address)
    origin = address.removesuffix("/lab.html").removeprefix("http:")
    browser.wait("new Promise((done) => setTimeout(() => done(true), 1500))")  # the spare worker
    Counted.paths.clear()
    type_file(browser, REACH)
    browser.click("#run")
    browser.wait(f"{STATUS} === 'Your file has raised an error.'")
    assert "the end" in browser.text(".problem p") and "of 90" not in browser.text("#results")
    refused = browser.value("fetch('lab.html').then(() => 'read', (error) => error.message)")
    assert refused == "Failed to fetch"
    assert [path for path in Counted.paths if "favicon" not in path] == [], origin
    complaints = " ".join(browser.errors)
    assert "connect-src" in complaints and "stolen" in complaints
