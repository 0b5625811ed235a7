"""A headless Chromium, through its DevTools protocol over a pipe. Needs nothing but the browser.

It reads messages from file descriptor 3 and writes them to 4; each ends with a zero byte.
"""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from queue import Queue

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE = 60  # seconds until something that has not come is an error


def found(selector: str) -> str:
    """JavaScript for the first element, of the page or within its <nano-run>."""
    where = f"querySelector({json.dumps(selector)})"
    return f"(document.{where} ?? document.querySelector('nano-run').shadowRoot.{where})"


class Browser:
    """One page. `errors` are what its console and its network have complained of."""

    def __init__(self, profile: Path):
        options = f"--headless --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe --user-data-dir={profile}"
        self.process = subprocess.Popen(
            ["sh", "-c", f"exec {CHROMIUM} {options} 3<&0 4>&1 </dev/null >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.ids = count(1)
        self.answers: dict[int, Queue] = {}
        self.errors: list[str] = []
        self.session = None
        threading.Thread(target=self._read, daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def call(self, method: str, **params) -> dict:
        message = {"id": next(self.ids), "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        queue = self.answers[message["id"]] = Queue()
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        answer = queue.get(timeout=PATIENCE)
        if "navigated" in answer.get("error", {}).get("message", ""):
            return self.call(method, **params)  # the next page can answer
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _read(self) -> None:
        rest = b""
        while chunk := self.process.stdout.read1():
            *messages, rest = (rest + chunk).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self.answers.pop(message["id"]).put(message)
                else:
                    self._hear(message["method"], message["params"])

    def _hear(self, method: str, params: dict) -> None:
        is_error = method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning")
        is_call = method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning")
        if is_error or is_call or method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params)[:500])

    # --- what a test does ---

    def open(self, url: str, width: int = 1280, height: int = 860, scheme: str = "light") -> None:
        self.resize(width, height)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=url)
        self.wait(
            f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'"
        )

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def value(self, expression: str):
        """Of JavaScript, in the page."""
        options = {"returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str):
        """Until it is true."""
        end = time.monotonic() + PATIENCE
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"it never became true: {expression}"
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        return self.value(f"{found(selector)}.textContent")

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of its first line: a link may have two."""
        self._mouse(selector, "mousePressed", "mouseReleased", button="left", clickCount=1)

    def _mouse(self, selector: str, *kinds: str, **more) -> None:
        where = found(selector)
        self.value(f"{where}.scrollIntoView({{block: 'center'}})")
        middle = "({x, y, width, height}) => [x + width / 2, y + height / 2]"
        x, y = self.value(f"({middle})({where}.getClientRects()[0])")
        for kind in kinds:
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def write(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}
        codes |= {"End": 35, " ": 32}
        key_event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        if key in ("Enter", " "):
            key_event["text"] = key.replace("Enter", "\r")
        self.call("Input.dispatchKeyEvent", type="keyDown", **key_event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key_event)


def opened(tmp_path_factory) -> Iterator[Browser]:
    """For a fixture: a browser with a profile of its own. Skips where there is no Chromium."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium (Debian's package: chromium)")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
