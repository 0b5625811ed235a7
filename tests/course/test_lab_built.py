"""The lab as it is built: in Chromium a scheduler is typed, run, stopped, saved and reloaded; in Pyodide ten schedulers
have the numbers of CPython. All of them are slow; they need npm, and most a Chromium.

Run: pytest tests/course/test_lab_built.py --slow [-k stop]
To see it: SHOTS=some/folder pytest tests/course/test_lab_built.py --slow -k pictures
"""

import json
import shutil
import subprocess
import threading
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import Browser, opened
from lab_numbers import NUM_OF_EACH, numbers

from nanovllm.lab.serving import Files
from tutorials.assignments.public import load
from tutorials.lab import build

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tests" / "tools"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, ("npm", "node"))),
        reason="there is no npm (it comes with Node.js)",
    ),
]
SCHEDULER = """from nanovllm.scheduler import Scheduler


class MyScheduler(Scheduler):
    def priority(self, request):
        {}
"""
SHORTEST = SCHEDULER.format('return request.params.extra_args["predicted_tokens"]')
ENDLESS = SCHEDULER.format("while True: pass")
STATUS = "document.querySelector('#status').textContent"
TEXT = "[...document.querySelectorAll('.cm-line')].map((line) => line.textContent).join('\\n')"
DONE = f"{STATUS}.startsWith('Done')"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build.build_lab(folder)
    return folder


def test_ten_schedulers_have_the_same_numbers_in_pyodide(site):
    assert sum(NUM_OF_EACH.values()) == 10
    folder = build.PACKAGES / "pyodide"
    command = ["node", str(TOOLS / "lab_numbers.mjs"), str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-2000:]
    theirs, ours = json.loads(done.stdout), dict(numbers(ROOT))
    assert len(ours) == 10 and theirs.keys() == ours.keys()
    assert [name for name in ours if theirs[name] != ours[name]] == []


def test_what_is_built_needs_no_network(site):
    for path in [site / "lab.html", site / "lab" / "lab.css", site / "lab" / "player.css"]:
        text = path.read_text(encoding="utf-8")
        assert "http://" not in text and "https://" not in text
    licenses = (site / "lab" / "licenses.txt").read_text(encoding="utf-8")
    assert "pyodide 314" in licenses and "codemirror 6" in licenses and "MIT" in licenses


# --- in a browser ---


class Counted(Files):
    """Notes what was asked for."""

    paths: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.paths.append(self.path)
        super().do_GET()


@pytest.fixture(scope="module")
def address(site):
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Counted, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/lab.html"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    yield from opened(tmp_path_factory)


@pytest.fixture
def browser(chromium, address):
    """With a page that remembers nothing."""
    chromium.call("Page.navigate", url="about:blank")
    origin = address.removesuffix("/lab.html")
    chromium.call("Storage.clearDataForOrigin", origin=origin, storageTypes="all")
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
    type_file(browser, SHORTEST)
    run(browser)
    found = cells(browser)
    assert found[""] == ["FCFS", "MyScheduler"]
    assert found["TTFT, p50 (s)"] == ["2.433", "0.065"]  # as the handout of a1 has it
    assert browser.text(".goals").startswith("mean latency / that of FCFS: 0.460 30 of 30 points")
    assert browser.value("document.querySelectorAll('.times g').length") == 80
    assert browser.value("document.querySelectorAll('.times .waits').length") > 0
    count = browser.value("document.querySelector('nano-run').run.frames.length")
    assert count > 50
    browser.value("document.querySelector('nano-run').goTo(40)")
    assert browser.value("document.querySelector('nano-run').frame.kv_blocks_used") > 0
    assert browser.errors == []


def test_tests_and_points_say_their_sentences(browser, address):
    open_lab(browser, address)
    type_file(browser, SHORTEST)
    run(browser, "#tests")
    said = browser.text("#results")
    assert "failed a long request starts while short ones keep coming" in said
    assert said.count("passed") == 3 and "it starves" in said and "needs PyTorch" in said
    run(browser, "#points")
    assert "50 of 90 points" in browser.text(".total")
    assert browser.errors == []


def test_an_endless_loop_is_stopped_and_a_warm_worker_takes_its_place(browser, address):
    open_lab(browser, address)
    for _ in range(2):
        type_file(browser, ENDLESS)
        browser.click("#run")
        browser.wait("!document.querySelector('#stop').disabled")
        assert browser.value("document.querySelector('#run').disabled")
        browser.click("#stop")
        browser.wait(f"{STATUS} === 'Stopped.'")
        assert browser.text("#results") == ""  # those of the run before are gone
        type_file(browser, SHORTEST)
        run(browser)
        assert cells(browser)["requests"] == ["500", "500"]
    assert browser.errors == []


def test_a_file_is_kept_saved_and_loaded(browser, address, tmp_path):
    open_lab(browser, address)
    type_file(browser, SHORTEST)
    open_lab(browser, address)  # again
    assert browser.value(TEXT) == SHORTEST
    folder = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.call("Page.setDownloadBehavior", **folder)
    browser.click("#save")
    saved = tmp_path / "my_scheduler.py"
    for _ in range(1000):
        if saved.is_file():
            break
        browser.value("new Promise((done) => setTimeout(done, 20))")
    assert saved.read_text(encoding="utf-8") == SHORTEST
    assert load(saved).MyScheduler
    other = tmp_path / "other.py"
    other.write_text("x = 1\n", encoding="utf-8")
    root = browser.call("DOM.getDocument")["root"]["nodeId"]
    node = browser.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    browser.call("DOM.setFileInputFiles", nodeId=node, files=[str(other)])
    browser.wait(f"{TEXT} === 'x = 1\\n'")
    browser.value("location.hash = 'a2'")  # each sheet has its own file
    browser.wait(f"{TEXT}.includes('no answer stands still')")
    browser.value("location.hash = 'a1'")
    browser.wait(f"{TEXT} === 'x = 1\\n'")
    browser.value("window.confirm = () => true")
    browser.click("#starter")
    browser.wait(f"{TEXT}.includes('TODO: the smallest key')")
    assert browser.errors == []


def test_a_slider_simulates(browser, address):
    open_lab(browser, address, "order")
    assert cells(browser)["mean latency (s)"][0] == cells(browser)["mean latency (s)"][1]
    browser.value(
        "const order = document.querySelector('#control-first'); order.value = 2; order.dispatchEvent(new Event('change'))"
    )
    browser.wait("document.querySelectorAll('.differs').length > 0")
    before, now = map(float, cells(browser)["mean latency (s)"])
    assert now < before
    assert browser.errors == []


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
raise ValueError(str(attempt(lambda: js.postMessage("forged"))))
"""


def test_a_file_reaches_no_network(browser, address):
    """Not even the server that the page came from."""
    open_lab(browser, address)
    origin = address.removesuffix("/lab.html").removeprefix("http:")
    browser.wait("new Promise((done) => setTimeout(() => done(true), 1500))")  # the spare worker
    Counted.paths.clear()
    type_file(browser, REACH)
    browser.click("#run")
    browser.wait(f"{STATUS} === 'Your file has raised an error.' || {STATUS}.includes('no answer')")
    refused = browser.value("fetch('lab.html').then(() => 'read', (error) => error.message)")
    assert refused == "Failed to fetch"
    assert [path for path in Counted.paths if "favicon" not in path] == [], origin
    complaints = " ".join(browser.errors)
    assert "connect-src" in complaints and "stolen" in complaints


def test_text_is_text(browser, address):
    open_lab(browser, address)
    image = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
    source = f"print({image!r})\nclass MyScheduler: pass\nraise ValueError({image!r})\n"
    type_file(browser, source)
    browser.click("#run")
    browser.wait(f"{STATUS} === 'Your file has raised an error.'")
    assert image in browser.text(".problem p") and image in browser.text(".printed")
    assert browser.value("window.hacked === undefined")
    assert browser.value("document.querySelectorAll('#results img, #results script').length") == 0
    assert browser.errors == []


# --- how it looks ---
