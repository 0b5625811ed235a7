"""Draws the server of chapter 17: what its two threads do during a few steps, and how long the first
token takes under load.

    python -m tutorials.figures serving_threads serving_load

The first is from a run here and now, the second from tutorials/results/cpu_serving_load.json. Needs
matplotlib and the server.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import uvicorn
from matplotlib.figure import Figure

from nanovllm import LLM
from nanovllm.server.answers import Answers
from nanovllm.server.app import new_app
from nanovllm.server.serve import bind
from nanovllm.server.settings import ServerOptions
from tutorials.figures.style import new_figure
from tutorials.machine import ROOT

RESULTS = ROOT / "tutorials" / "results"
# of Okabe and Ito's colors, which the color-blind can tell apart
OURS = "#0072B2"
THEIRS = "#999999"
NUM_CLIENTS = 8
NUM_STEPS = 3  # that are drawn
KINDS = {  # the row, the color, and what it is
    "step": (1, OURS, "engine: a step"),
    "text": (1, "#56B4E9", "engine: what is new"),
    "hear": (0, "#D55E00", "loop: takes the news in"),
    "event": (0, "#E69F00", "loop: makes an event"),
    "write": (0, "#009E73", "loop: writes to a socket"),
}


class Span(NamedTuple):
    kind: str
    begin: float
    end: float


def recorded() -> list[Span]:
    """A server, and clients in a process of their own; what its threads did, and when."""
    spans: list[Span] = []
    app = new_app(LLM(num_blocks=256), ServerOptions(served_model_name=["embedded"]))

    async def timed_app(scope, receive, send) -> None:
        async def timed_send(message) -> None:
            begin = time.perf_counter()
            await send(message)
            if message.get("body"):
                spans.append(Span("write", begin, time.perf_counter()))

        await app(scope, receive, timed_send)

    def timed(kind: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spans.append(Span(kind, begin, time.perf_counter()))

        return call

    sock = bind("127.0.0.1", 0)
    web = uvicorn.Server(uvicorn.Config(timed_app, log_level="warning"))
    thread = threading.Thread(target=web.run, args=([sock],))
    thread.start()
    while not web.started:
        time.sleep(0.01)
    engine = app.state.server.engine
    engine.llm.step = timed("step", engine.llm.step)
    engine._step = timed("text", engine._step)  # the step is a part of it
    engine._deal_out = timed("hear", engine._deal_out)
    events = Answers.events
    Answers.events = timed("event", events)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    command = [sys.executable, "-m", "tutorials.performance.clients", url]
    try:
        options = ["--clients", str(NUM_CLIENTS), "--tokens", "60"]
        subprocess.run([*command, *options], cwd=ROOT, check=True, capture_output=True)
    finally:
        Answers.events = events
        web.should_exit = True
        thread.join()
    return spans


def draw_threads() -> Figure:
    spans = recorded()
    steps = [span for span in spans if span.kind == "step"][10:]  # all clients have come
    windows = [*zip(steps, steps[NUM_STEPS:])]
    # the steps during which no other program had the processor
    first, last = min(windows, key=lambda pair: pair[1].begin - pair[0].begin)
    figure = new_figure(10, 3)
    axes = figure.subplots()
    for kind in ("text", "step", "hear", "event", "write"):
        row, color, label = KINDS[kind]
        bars = [
            (1e3 * (span.begin - first.begin), 1e3 * (span.end - span.begin))
            for span in spans
            if span.kind == kind and first.begin < span.end and span.begin < last.begin
        ]
        axes.broken_barh(bars, (row - 0.3, 0.6), color=color, label=label, linewidth=0)
    for span in spans:
        if span.kind == "text" and first.begin <= span.end < last.begin:
            x = 1e3 * (span.end - first.begin)
            axes.annotate("", (x, 0.3), (x, 0.7), arrowprops={"arrowstyle": "->"})
    axes.set_yticks([1, 0], ["engine's thread", "event loop"])
    axes.set_ylim(-0.5, 1.5)
    axes.set_xlim(0, 1e3 * (last.begin - first.begin))
    axes.set_xlabel(f"milliseconds; {NUM_CLIENTS} streams")
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize="small")
    return figure


def draw_load() -> Figure:
    report = json.loads((RESULTS / "cpu_serving_load.json").read_bytes())
    figure = new_figure(8, 4)
    axes = figure.subplots()
    others = iter(("#D55E00", "#009E73", "#CC79A7"))
    colors = {"nanovllm": OURS, "naive": THEIRS}
    for name, rows in report["load"].items():
        color = colors.get(name) or next(others)
        rates = [row["rate"] for row in rows]
        for q, style in ((50, "o-"), (99, "x--")):
            seconds = [row[f"ttft_p{q}"] for row in rows]
            label = f"{name}, {'half of all' if q == 50 else '99 of 100'} had it after"
            axes.plot(rates, seconds, style, color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [row["rate"] for row in report["load"]["nanovllm"]]
    axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
    axes.set_xlabel("requests per second")
    axes.set_ylabel("seconds until the first token")
    axes.set_title(f"embedded model, {report['tokens']} tokens per answer\n{report['device']}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


FIGURES = {"serving_threads": draw_threads, "serving_load": draw_load}
