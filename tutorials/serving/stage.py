"""A stage for chapter 17: a server, its engine, and clients that do something between two steps.

The engine stops at the end of a step that the script names. So the same happens on every machine. A
client's request is named after it: its prompt is its name.
"""

import json
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from itertools import groupby
from select import select

from nanovllm import LLM
from tutorials.serving.naive_server import NaiveServer

SECONDS = 60.0  # until something must have happened
END = "the end"  # a client that shows that all others have been served


class Stage:
    """What a script may do: `ask`, `after_step`, `hang_up`, in the end `show`."""

    def __init__(self, llm: LLM, port: int):
        self.llm = llm
        self.port = port
        self.connections: dict[str, HTTPConnection] = {}
        self.asked: dict[str, int] = {}  # after which step
        self.left: dict[str, int] = {}
        self.steps: list[tuple[str, ...]] = []  # whose requests took part
        self.stop_after = 0  # the number of a step, 0: none
        self.key = "ann"  # the API key of clients that ask now
        self.has_stopped = threading.Event()
        self.may_go_on = threading.Event()
        llm.observers.append(self._observe)

    def _observe(self, schedule, seconds) -> None:
        """Is called at the end of each step, in the engine's thread."""
        self.steps.append(tuple(item.seq.request.prompt for item in schedule.items))
        if len(self.steps) == self.stop_after:
            self.has_stopped.set()
            self.may_go_on.wait(SECONDS)
            self.may_go_on.clear()

    # --- what a script does ---

    def ask(self, name: str, num_tokens: int) -> None:
        """A client asks for `num_tokens` tokens, as a stream, if the server has streams. After the first
        step of the first client, the engine stops."""
        if not self.asked:
            self.stop_after = len(self.steps) + 1
        num_noticed = self.num_noticed()
        self.asked[name] = len(self.steps)
        connection = self.sent(prompt=name, max_tokens=num_tokens, stream=True)
        self.connections[name] = connection
        if self.has_stopped.is_set():
            self.wait_for_notice(num_noticed, connection)
        else:
            self.wait_for_stop()

    def after_step(self, number: int) -> None:
        """What follows happens when this step has ended."""
        if len(self.steps) < number:
            self.has_stopped.clear()
            self.stop_after = number
            self.may_go_on.set()
            self.wait_for_stop()

    def hang_up(self, name: str) -> None:
        num_noticed = self.num_noticed()
        self.left[name] = len(self.steps)
        self.connections.pop(name).close()
        self.wait_for_notice(num_noticed)

    def show(self) -> None:
        """Lets all others be served, and prints whose requests took part in which steps."""
        refused = self.served()
        begin = 1
        for names, some in groupby(names for names in self.steps if END not in names):
            end = begin + len([*some]) - 1
            print(f"steps {begin:3} to {end:3}: {', '.join(names)}")
            begin = end + 1
        for name, step in self.asked.items():
            numbers = [i for i, names in enumerate(self.steps, 1) if name in names]
            if name in refused:
                print(f"{name} is refused: {refused[name]}")
            elif name in self.left:
                num_more = sum(i > self.left[name] for i in numbers)
                print(f"{name} has left, and {num_more} more steps compute for it")
            else:
                print(f"{name} waits {numbers[-1] - step} steps for its answer")

    # --- single calls ---

    def sent(self, **body) -> HTTPConnection:
        """A connection on which a request has been sent."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        body = {"temperature": 0, "ignore_eos": True, **body}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection

    def text(self, **body) -> str:
        """All that a server answers, without the frames in which HTTP sends it."""
        return self.sent(**body).getresponse().read().decode()

    def error(self, **body) -> str:
        """What a refused client reads."""
        return json.loads(self.text(**body))["error"]["message"]

    # --- behind it ---

    def num_noticed(self) -> int | None:
        """How many calls the server has passed to the engine that stands still; None: it looks at no
        other call meanwhile."""
        return None

    def wait_for_stop(self) -> None:
        if not self.has_stopped.wait(SECONDS):
            raise TimeoutError("the engine has not come to the step where it should stop")

    def wait_for_notice(self, before: int | None, connection: HTTPConnection | None = None) -> None:
        """Until the server has passed on one more call, or has answered it."""
        sockets = [connection.sock] if connection else []
        wait_until(
            lambda: (
                before is None
                or self.num_noticed() != before
                or bool(select(sockets, [], [], 0)[0])
            )
        )

    def served(self) -> dict[str, str]:
        """Lets the engine go on until all are served. Returns what refused clients read."""
        self.stop_after = 0
        self.may_go_on.set()
        refused = {}
        for name, connection in self.connections.items():
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                again = response.headers["Retry-After"]
                message = json.loads(answer)["error"]["message"]
                refused[name] = f"{response.status}, Retry-After {again}: {message}"
        self.text(prompt=END, max_tokens=1)
        wait_until(lambda: not self.llm.has_unfinished())
        return refused


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the server has not done what it should")
        time.sleep(0.001)


class NaiveStage(Stage):
    """With the naive server, or one that is made of it."""

    def __init__(self, server_class: type[NaiveServer] = NaiveServer):
        server = server_class(LLM(num_blocks=256))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        super().__init__(server.llm, server.server_port)


class RealStage(Stage):
    """With `nanovllm serve`, in a thread."""

    def __init__(self, max_num_seqs: int = 256, max_waiting: int = 256, keys=(), **options):
        import uvicorn

        from nanovllm.topics.fairness.shares import FairShares
        from nanovllm.topics.server.app import new_app
        from nanovllm.topics.server.serve import bind
        from nanovllm.topics.server.settings import ServerOptions

        settings = ServerOptions(
            served_model_name=["tiny"],
            api_key=[*keys],
            max_waiting=max_waiting,
            log_requests=False,
        )
        options = {"scheduler_cls": FairShares, **options}
        app = new_app(LLM(num_blocks=256, max_num_seqs=max_num_seqs, **options), settings)
        web = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        sock = bind("127.0.0.1", 0)  # 0 is any free port
        threading.Thread(target=web.run, args=([sock],), daemon=True).start()
        wait_until(lambda: web.started)
        self.engine = app.state.server.engine
        self.calls: list[list[str]] = []  # into the event loop: whose news each one brings
        tell = self.engine._tell

        def note(function, news):
            self.calls.append([request.prompt for request, _ in news])
            tell(function, news)

        self.engine._tell = note
        super().__init__(self.engine.llm, sock.getsockname()[1])

    def num_noticed(self) -> int:
        return self.engine.inbox.qsize()
