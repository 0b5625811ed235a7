"""Pairs of policies on identical jobs: does the simulator say which one is better?

For each pair, the real engine played the same jobs with both policies, in turns, several times. Then
both were simulated on the machine that was fitted to steps of other runs. What is compared is the
difference between the two policies: its sign, and its size. The measured times are in
tutorials/results/simulator_pairs*.json.

A difference is *clear* if it is more than twice the range of what was measured: of the differences
in the single turns.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, median

from nanovllm import Job, Run
from nanovllm.scheduler import Scheduler
from nanovllm.topics.simulator.machines import Machine
from tutorials.measure.cases import SWAP, Case, Options, chats, documents, jobs_of, plain
from tutorials.report import percentile
from tutorials.simulation.metrics import between_tokens, latency, ttft
from tutorials.simulation.policies import (
    EarliestDeadline,
    HighWatermark,
    LastFirst,
    MostBlocks,
    NoWatermark,
    Oldest,
    OnePrompt,
    PromptsFirst,
    ShortestFirst,
    ShortestPrompt,
    ShortPushesOut,
    SmallPromptBound,
    WholePrompts,
)
from tutorials.simulation.workloads import (
    Arrivals,
    fixed,
    labelled,
    lognormal,
    merged,
    predicted,
    workload,
)

MEASURES: dict[str, Callable[[Run], list[float]]] = {
    "TTFT": lambda run: [*map(ttft, run.requests)],
    "gaps": lambda run: between_tokens(run.requests),
    "latency": lambda run: [*map(latency, run.requests)],
}
KINDS = ("mean", "p99")
CLEAR = 2.0  # times the range of the real differences

# --- loads ---


def guessed(arrivals: Arrivals, count: int) -> list[Job]:
    return predicted(workload(arrivals, chats(), count), sigma=0.5)


def mixed(arrivals: Arrivals, count: int) -> list[Job]:
    """Short questions, and every fifth is about a long text."""
    times = [time for time, _ in zip(arrivals, range(count))]
    questions = lognormal(60, 40, max_model_len=500)
    texts = lognormal(700, 30, max_model_len=1800)
    few = times[::5]
    many = [time for i, time in enumerate(times) if i % 5]
    return merged(workload(many, questions, len(many)), workload(few, texts, len(few)))


def hurried(arrivals: Arrivals, count: int) -> list[Job]:
    """Every second one is urgent, in no order of length."""
    times = [time for time, _ in zip(arrivals, range(count))]
    urgent = workload(times[::2], chats(), len(times[::2]))
    patient = workload(times[1::2], lognormal(80, 60, max_model_len=1000), len(times[1::2]))
    return merged(labelled(urgent, deadline=1.0), labelled(patient, deadline=20.0))


long_outputs = plain(lambda: lognormal(30, 250, max_model_len=1500))
equal = plain(lambda: fixed(40, 120))


@dataclass(frozen=True)
class Pair:
    """Two settings for the same jobs: options of the engine, the usual ones first."""

    name: str
    case: Case
    other: Options
    base: Options = field(default_factory=dict)

    @property
    def cases(self) -> tuple[Case, Case]:
        """Of the one and of the other."""
        return tuple(
            Case(self.case.build, self.case.load, {**self.case.options, **own})
            for own in (self.base, self.other)
        )


def by(cls: type[Scheduler]) -> Options:
    return {"scheduler_cls": cls}


few_seats = {"max_num_seqs": 8}
scarce = {"num_blocks": 160, "enable_prefix_caching": False}
PAIRS = [
    Pair("last first", Case(plain(chats), 0.9, options=few_seats), by(LastFirst)),
    Pair("shortest first, guessed", Case(guessed, 0.9, options=few_seats), by(ShortestFirst)),
    Pair("shortest prompt first", Case(mixed, 0.9, options=few_seats), by(ShortestPrompt)),
    Pair("earliest deadline", Case(hurried, 0.9, options=few_seats), by(EarliestDeadline)),
    Pair("pushes out", Case(guessed, 0.9, options=few_seats), by(ShortPushesOut), by(ShortestFirst)),
    Pair("4 seats", Case(plain(chats), 0.6), {"max_num_seqs": 4}),
    Pair("budget 64", Case(mixed, 0.5), {"max_num_batched_tokens": 64}),
    Pair("budget 256", Case(mixed, 0.6), {"max_num_batched_tokens": 256}),
    Pair("64 tokens for prompts", Case(mixed, 0.5), by(SmallPromptBound)),
    Pair("prompts first", Case(mixed, 0.7, options={"max_num_batched_tokens": 256}), by(PromptsFirst)),
    Pair("one prompt at a time", Case(mixed, 0.6), by(OnePrompt)),
    Pair("whole prompts", Case(mixed, 0.7, options={"max_num_batched_tokens": 256}), by(WholePrompts)),
    Pair("no prefix cache", Case(documents, 0.5), {"enable_prefix_caching": False}),
    Pair("no watermark", Case(long_outputs, None, options=scarce), by(NoWatermark)),
    Pair("watermark 20 %", Case(long_outputs, None, options=scarce), by(HighWatermark)),
    Pair("victim: most blocks", Case(long_outputs, None, options=scarce), by(MostBlocks)),
    Pair("victim: the oldest", Case(equal, None, options=scarce), by(Oldest)),
    Pair("swap", Case(long_outputs, None, options=scarce | by(NoWatermark)), SWAP),
]  # fmt: skip


# --- numbers ---


def numbers(run: Run) -> dict[str, float]:
    """Seconds, by measure and kind: "TTFT mean"."""
    found = {}
    for name, measure in MEASURES.items():
        values = sorted(measure(run))
        found[f"{name} mean"] = mean(values)
        found[f"{name} p99"] = percentile(values, 99) or 0.0
    return found


KEYS = [f"{name} {kind}" for name in MEASURES for kind in KINDS]


def difference(one: dict[str, float], other: dict[str, float], key: str) -> float:
    return other[key] / one[key] - 1


def judged(row: dict, key: str) -> dict:
    """What a measure says of a pair. `row` has the numbers of both, real and simulated."""
    real = [difference(*turn, key) for turn in zip(row["real"][0], row["real"][1])]
    middle = median(real)
    spread = max(real) - min(real)
    guess = difference(*row["simulated"], key)
    return {
        "real": middle,
        "range": spread,
        "simulated": guess,
        "is_clear": abs(middle) > CLEAR * spread,
        "agrees": (guess > 0) == (middle > 0),
    }


def errors(row: dict, key: str) -> list[float]:
    """Of the simulation, relative to the median of the real runs; for both policies."""
    return [
        simulated[key] / median(one[key] for one in real) - 1
        for real, simulated in zip(row["real"], row["simulated"])
    ]


def jobs_of_pair(pair: Pair, machine: Machine, seconds: float) -> list[Job]:
    return jobs_of(pair.cases[0], machine, seconds)
