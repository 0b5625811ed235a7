r"""What the two threads of a server do during a few steps of three streams, and when. Chapter 17 draws it.

    OMP_NUM_THREADS=1 python -m measure.serving_threads \
        --json tutorials/results/serving_threads.json

The embedded model; the clients are a process of their own. Of all steps in which three streams run,
the report has those that took the least time together: there, no other program had the processor.
All times are in seconds from the beginning of the first of them.
"""

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from tutorials.arguments import experiment, positive
from tutorials.machine import ROOT, device_name, environment, installed
from tutorials.report import write_json

NUM_STREAMS = 3
NUM_STEPS = 3  # that are reported
WARM_UP = 10  # steps in which the clients come


class Span(NamedTuple):
    """A thread was busy with this. `stream` counts the streams; -1: of all."""

    what: str  # step or report of the engine's thread; hear, event or write of the loop's
    begin: float
    end: float
    stream: int = -1


class Recorder:
    """Notes when the functions of a server begin and end."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.streams: dict[object, int] = {}  # by the task that writes

    def note(self, what: str, begin: float, stream: int = -1) -> None:
        self.spans.append(Span(what, begin, time.perf_counter(), stream))

    def this_stream(self) -> int:
        return self.streams.setdefault(asyncio.current_task(), len(self.streams))

    def timed(self, what: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.note(what, begin, self.this_stream() if what == "event" else -1)
            return result

        return call

    def wrapped(self, app: Callable) -> Callable:
        """The same app, whose writes are noted."""

        async def timed_app(scope, receive, send) -> None:
            async def timed_send(message) -> None:
                begin = time.perf_counter()
                await send(message)
                if message.get("body"):
                    self.note("write", begin, self.this_stream())

            await app(scope, receive, timed_send)

        return timed_app


def recorded(num_tokens: int) -> list[Span]:
    """What the threads of a server have done for streams of so many tokens."""
    from nanovllm import LLM
    from nanovllm.server.answers import Answers
    from nanovllm.server.app import new_app
    from nanovllm.server.serve import bind, new_server
    from nanovllm.server.settings import ServerOptions

    recorder = Recorder()
    options = ServerOptions(served_model_name=["embedded"], log_requests=False)
    app = new_app(LLM(num_blocks=256), options)
    web = new_server(app)
    web.config.app = recorder.wrapped(app)
    sock = bind("127.0.0.1", 0)
    thread = threading.Thread(target=web.run, args=([sock],))
    thread.start()
    while not web.started:
        time.sleep(0.01)
    engine = app.state.server.engine
    engine.llm.step = recorder.timed("step", engine.llm.step)
    engine._report = recorder.timed("report", engine._report)
    engine._deal_out = recorder.timed("hear", engine._deal_out)
    events = Answers.events
    Answers.events = recorder.timed("event", events)
    try:
        run_clients("http://{}:{}".format(*sock.getsockname()), num_tokens)
    finally:
        Answers.events = events
        web.should_exit = True
        thread.join()
    return recorder.spans


def run_clients(url: str, num_tokens: int) -> None:
    command = [sys.executable, "-m", "tutorials.performance.clients", url]
    command += ["--clients", str(NUM_STREAMS), "--tokens", str(num_tokens)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def between(spans: list[Span], begin: float, end: float) -> list[Span]:
    return [span for span in spans if begin < span.end and span.begin < end]


def fastest(spans: list[Span]) -> list[Span]:
    """Those of the steps that took the least time together, in which each stream was written to as
    often. Times are from the first step's beginning on, streams are counted anew."""
    steps = [span.begin for span in spans if span.what == "step"][WARM_UP:-WARM_UP]
    found = []
    for begin, end in sorted(zip(steps, steps[NUM_STEPS:]), key=lambda pair: pair[1] - pair[0]):
        found = between(spans, begin, end)
        writes = Counter(span.stream for span in found if span.what == "write")
        if [*writes.values()] == [NUM_STEPS] * NUM_STREAMS:
            break
    else:
        raise ValueError("no steps were written one by one: the machine is busy")
    names = {stream: i for i, stream in enumerate(sorted(writes))}
    return [
        Span(span.what, span.begin - begin, span.end - begin, names.get(span.stream, -1))
        for span in found
    ]


def measure(num_tokens: int) -> dict:
    import torch

    spans = fastest(recorded(num_tokens))
    report = environment() | {"device": device_name(torch.device("cpu"))}
    report["versions"] = {name: installed(name) for name in ("torch", "uvicorn")}
    report["streams"] = NUM_STREAMS
    report["spans"] = [span._asdict() for span in sorted(spans, key=lambda span: span.begin)]
    return report


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument("--tokens", type=positive, default=500, help="of each stream")
    args = parser.parse_args()
    report = measure(args.tokens)
    for span in report["spans"]:
        times = f"{1000 * span['begin']:.3f} to {1000 * span['end']:.3f} ms"
        print(f"{span['what']:6} {span['stream']:2} {times}")
    write_json(report, args.json)


if __name__ == "__main__":
    main()
