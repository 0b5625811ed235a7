"""What the page needs of a server, without an engine: its files, canned answers, frames when told."""

import json
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

import nanovllm

PAGE = Path(nanovllm.__file__).parent / "topics" / "server" / "page"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".json": "application/json",
}
# a page that has the player, and nothing else
SENTENCE = """<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,"><script src="player.js" defer></script><p id="text">A sentence.</p>"""
POLICY = "default-src 'self'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'"


def run_named(name: str) -> dict:
    return json.loads((PAGE / "runs" / f"{name}.json").read_bytes())


class FakeServer(ThreadingHTTPServer):
    """`answer` is a list of deltas, or an error's (status, message). Without `is_endless`, the answer ends."""

    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = [{"content": "Hello"}]
        self.counts: Iterable[int] = range(1, 1000)  # tokens up to each delta
        self.answer_id = "chatcmpl-1"
        self.is_endless = False
        self.key = ""  # an API key
        self.bodies: list[dict] = []
        self.has_left = threading.Event()  # the reader of an endless answer
        self.readers: list[Queue] = []  # of /live
        self.last_frame: dict | None = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def send_frame(self, frame: dict) -> None:
        self.last_frame = frame
        for queue in [*self.readers]:
            queue.put(frame)


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args) -> None:
        """Says nothing."""

    def parse_request(self) -> bool:
        """Refuses what needs a key."""
        is_read = super().parse_request()
        given = self.headers.get("Authorization", "").encode("latin-1")
        is_file = (PAGE / self.path[1:]).exists()
        if is_file or not self.server.key or given == f"Bearer {self.server.key}".encode():
            return is_read
        self._send(401, "application/json", b'{"error": {"message": "no key"}}')
        return False

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(
                200, "application/json", json.dumps({"data": [{"id": "tiny-qwen3"}]}).encode()
            )
        elif self.path == "/live":
            self._live()
        elif self.path == "/sentence":
            self._send(200, "text/html", SENTENCE.encode())
        else:
            self._file(PAGE / ("index.html" if self.path == "/" else self.path[1:]))

    def _file(self, path: Path) -> None:
        if path.is_file():
            self._send(200, TYPES[path.suffix], path.read_bytes())
        else:
            self._send(404, "text/plain", b"not here")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)

    def _begin_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def _live(self) -> None:
        queue: Queue = Queue()
        if self.server.last_frame is not None:
            queue.put(self.server.last_frame)
        self.server.readers.append(queue)
        try:
            self._begin_events()
            while True:
                self._event(json.dumps(queue.get()))
        except OSError:
            self.server.readers.remove(queue)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            tokens = [*body["messages"][0]["content"].encode()]
            self._send(200, "application/json", json.dumps({"tokens": tokens}).encode())
            return
        self.server.bodies.append(body)
        if self.path == "/v1/completions":
            self._complete(body["prompt"])
            return
        answer = self.server.answer
        if isinstance(answer, tuple):
            status, message = answer
            body = json.dumps({"error": {"message": message}}).encode()
            self._send(status, "application/json", body)
            return
        self._begin_events()
        try:
            for num_tokens, delta in zip(self.server.counts, answer):
                self._choice({"delta": delta}, usage={"completion_tokens": num_tokens})
            while self.server.is_endless:
                self._choice({"delta": {"content": " more"}})
                threading.Event().wait(0.03)
        except OSError:
            self.server.has_left.set()
            return
        self._choice({"delta": {}, "finish_reason": "stop"})
        details = {"cached_tokens": 16}
        usage = {"prompt_tokens": 21, "completion_tokens": 8, "prompt_tokens_details": details}
        self._event(json.dumps({"choices": [], "usage": usage}))
        self._event("[DONE]")

    def _choice(self, choice: dict, index: int = 0, **more) -> None:
        choice = {"index": index, **choice}
        self._event(json.dumps({"id": self.server.answer_id, "choices": [choice], **more}))

    def _complete(self, prompts: list) -> None:
        """Each answer is the length of its prompt."""
        self._begin_events()
        try:
            for i, prompt in enumerate(prompts):
                self._choice({"text": str(len(prompt)), "finish_reason": None}, i)
            while self.server.is_endless:
                self._choice({"text": " more", "finish_reason": None})
                threading.Event().wait(0.03)
            for i in range(len(prompts)):
                self._choice({"text": "!", "finish_reason": "stop"}, i)
            self._event("[DONE]")
        except OSError:
            self.server.has_left.set()
