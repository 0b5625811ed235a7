r"""What two ranks do, and when: for one token, with two matrices; and in a step of the embedded model. Chapter 18
draws it.

    OMP_NUM_THREADS=1 python -m measure.parallel_timeline \
        --json tutorials/results/parallel_timeline.json

The two matrices are those of the chapter: two threads split them by layers, then inside the layers.
The step is a decode of one sequence, in two processes that are the engine's. Of all tokens and steps,
the report has those that took the least time: there, no other program had the processor. All times
are in seconds from their beginning on.
"""

import multiprocessing
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL, TOKENS_PER_STEP, Config
from nanovllm.layers.rotary import longest_context
from nanovllm.loader import load_config
from nanovllm.parallel.ranks import Group
from nanovllm.parallel.runner import Follower, Leader, end_steps
from tutorials.arguments import experiment, positive
from tutorials.machine import device_name, environment, installed
from tutorials.parallel.two_ranks import Rank, Turns, Work, fastest, matrices, run
from tutorials.report import write_json

WARM_UP = 10  # steps


class Span(NamedTuple):
    """A rank was busy with this: it computes, waits, or does something together with the other one.
    The kinds are compute, wait, add_up, gather, sample and tell."""

    kind: str
    begin: float
    end: float


Spans = list[Span]  # of one rank, in order


# --- two matrices ---


def splits(hidden: int, middle: int) -> dict[str, Work]:
    """The two functions of the chapter."""
    up, down = matrices(hidden, middle)

    def by_layers(rank: Rank, x: Tensor) -> Tensor:
        if rank.number == 0:
            rank.send(torch.relu(up @ x))
            return rank.receive()
        y = down @ rank.receive()
        rank.send(y)
        return y

    def inside(rank: Rank, x: Tensor) -> Tensor:
        my_up = up.chunk(2, dim=0)[rank.number]
        my_down = down.chunk(2, dim=1)[rank.number]
        return rank.add_up(my_down @ torch.relu(my_up @ x))

    return {"by_layers": by_layers, "inside": inside}


def spans_of(turns: Turns) -> list[Spans]:
    """For each rank when it computes and when it waits."""
    zero = min(turn.begin for turn in turns)
    found = []
    for turn in turns:
        spans = []
        time_now = turn.begin
        for begin, end in turn.waits:
            spans += [Span("compute", time_now, begin), Span("wait", begin, end)]
            time_now = end
        spans.append(Span("compute", time_now, turn.end))
        found.append([Span(kind, begin - zero, end - zero) for kind, begin, end in spans])
    return found


# --- a step of two processes ---


class TimedGroup(Group):
    """Notes when this rank comes to each place where it needs the other one, and when it goes on."""

    def __init__(self, *args):
        super().__init__(*args)
        self.spans: Spans = []

    def add_up(self, x):
        return self._timed("add_up", super().add_up, x)

    def gather(self, x):
        return self._timed("gather", super().gather, x)

    def tell(self, message):
        return self._timed("tell", super().tell, message)

    def _timed(self, kind: str, function, x):
        begin = time.perf_counter()  # on Linux it is one clock for all processes
        result = function(x)
        self.spans.append(Span(kind, begin, time.perf_counter()))
        return result


def group_and_arguments(store: dist.Store, rank: int) -> tuple[TimedGroup, tuple]:
    torch.set_num_threads(1)
    config = Config(tensor_parallel_size=2, num_blocks=64, device="cpu")
    path = Path(EMBEDDED_MODEL)
    hf_config = load_config(path)
    limits = config.resolved(longest_context(hf_config), TOKENS_PER_STEP["cpu"])
    group = TimedGroup(store, rank, 2, "127.0.0.1")
    device = torch.device("cpu")
    group.connect(device)
    return group, (config, limits, hf_config, path, device)


def follow(port: int, pipe) -> None:
    """The process of rank 1."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group, arguments = group_and_arguments(store, 1)
    Follower(group, *arguments).follow()
    pipe.send(group.spans)


def recorded(num_tokens: int) -> list[Spans]:
    """All meetings of each rank, in the same order: both come to the same places."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=follow, args=(store.port, theirs), daemon=True)
    process.start()
    group, arguments = group_and_arguments(store, 0)
    llm = LLM(runner=Leader(group, *arguments), num_blocks=64, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    llm.generate("Once upon a time", params, use_tqdm=False)
    end_steps(group)
    meetings = [group.spans, ours.recv()]
    process.join()
    return meetings


def fastest_step(meetings: list[Spans]) -> list[Spans]:
    """What both do from the moment in which a step is known until the next one is."""
    first, second = meetings
    assert [span.kind for span in first] == [span.kind for span in second]
    steps = [i for i, span in enumerate(first) if span.kind == "tell"][WARM_UP:]

    def seconds(pair: tuple[int, int]) -> float:
        begin, end = pair
        return max(rank[end].end for rank in meetings) - min(rank[begin].end for rank in meetings)

    begin, end = min(pairwise(steps), key=seconds)
    return [spans_of_step(meetings, row, begin, end) for row in range(2)]


def spans_of_step(meetings: list[Spans], row: int, begin: int, end: int) -> Spans:
    """Of one rank: what it does between its meetings, and how long it waits at each."""
    zero = min(rank[begin].end for rank in meetings)
    rank = meetings[row]
    spans = []
    for i in range(begin, end):
        last, meeting = rank[i], rank[i + 1]
        is_sampling = last.kind == "gather" and row == 0
        both_there = max(other[i + 1].begin for other in meetings)
        only_sends = meeting.kind == "gather" and row == 1  # it does not wait
        there = meeting.begin if only_sends else min(both_there, meeting.end)
        spans += [
            Span("sample" if is_sampling else "compute", last.end, meeting.begin),
            Span("wait", meeting.begin, there),
            Span(meeting.kind, there, meeting.end),
        ]
    return [Span(kind, a - zero, b - zero) for kind, a, b in spans if b > a]


# --- the report ---


def measure(num_tokens: int, hidden: int, middle: int) -> dict:
    report = environment() | {"device": device_name(torch.device("cpu"), 2)}
    report["versions"] = {"torch": installed("torch")}
    report |= {"hidden": hidden, "middle": middle}
    x = torch.ones(hidden)
    found = {}
    for name, work in splits(hidden, middle).items():
        _, turns = run(work, x, num_tokens=num_tokens)
        found[name] = spans_of(fastest(turns))
    found["step"] = fastest_step(recorded(num_tokens))
    for name, ranks in found.items():
        report[name] = [[span._asdict() for span in spans] for spans in ranks]
    return report


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument("--tokens", type=positive, default=150)
    args = parser.parse_args()
    report = measure(args.tokens, hidden=2560, middle=9728)
    for name in ("by_layers", "inside", "step"):
        for i, spans in enumerate(report[name]):
            waits = sum(span["end"] - span["begin"] for span in spans if span["kind"] == "wait")
            ms = 1000 * spans[-1]["end"]
            print(f"{name:9} rank {i}: {ms:.2f} ms, of which it waits {1000 * waits:.2f} ms")
    write_json(report, args.json)


if __name__ == "__main__":
    main()
