"""The studies of chapters 16 and 19, each as two numbers and what the chapter says of them."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import gt, lt
from pathlib import Path
from typing import Any

from nanovllm import Job, PrefixAffinity, RoundRobin, Run, simulate
from nanovllm.config import Config
from nanovllm.scheduler import Scheduler
from nanovllm.topics.simulator.cost_model import Hardware, Link
from nanovllm.topics.simulator.machines import MACHINES, Machine
from tutorials.simulation.metrics import by_tenant, distribution, summary, ttft
from tutorials.simulation.policies import (
    EarliestDeadline,
    FairByTenant,
    HighWatermark,
    LeastServed,
    LongestPrefix,
    MostBlocks,
    NoWatermark,
    PromptBound,
    PromptsFirst,
    ShortestDecodesFirst,
    ShortestFirst,
    UrgentPushesOut,
    WithALimit,
)
from tutorials.simulation.workloads import (
    all_at_once,
    alpaca,
    deadlines,
    fixed,
    labelled,
    lognormal,
    merged,
    multi_turn,
    poisson,
    predicted,
    shared_prefix,
    sharegpt,
    tenants,
    workload,
)

# --- numbers of a run ---


def number(*path: str) -> Callable[[Run], float]:
    """One of the measures in `summary`."""

    def find(run: Run) -> float:
        value: Any = summary(run)
        for name in path:
            value = value[name]
        return float(value)

    return find


latency, first = number("latency", "mean"), number("ttft", "mean")
last_first, late_first = number("ttft", "max"), number("ttft", "p99")
pause, longest_pause = number("between_tokens", "p99"), number("between_tokens", "max")
computed_again, preemptions = number("tokens_computed_again"), number("preemptions")
met, hits, jain = number("deadlines_met"), number("prefix_hit_rate"), number("jain_tenants")


def seconds(run: Run) -> float:
    return run.seconds


def tokens_per_second(run: Run) -> float:
    return sum(len(request.token_times) for request in run.requests) / run.seconds


def first_of_quiet(run: Run) -> float:
    return distribution(map(ttft, by_tenant(run.requests)["quiet"]))["mean"] or 0.0


# --- loads ---

SERVER = Config(model="qwen3-8b", max_num_seqs=32, max_num_batched_tokens=1024)
SCARCE = Config(
    model="qwen3-8b",
    num_blocks=400,
    enable_prefix_caching=False,
    max_model_len=2048,
    max_num_batched_tokens=1024,
)
LIBRARY = Config(
    model="qwen3-8b",
    num_blocks=1500,
    max_num_seqs=32,
    max_model_len=4096,
    max_num_batched_tokens=1024,
)
LARGE = Config(model="qwen3-32b", tensor_parallel_size=2)


def guessed() -> list[Job]:
    return predicted(workload(poisson(110), alpaca(), 400), sigma=0.5)


def long_prompts() -> list[Job]:
    lengths = lognormal(1500, 60, max_model_len=8192)
    return predicted(workload(poisson(12), lengths, 160), sigma=0.5)


def loud_and_quiet() -> list[Job]:
    return tenants({"loud": 100, "quiet": 10}, alpaca(), 400)


def readers_and_writers() -> list[Job]:
    readers = labelled(workload(poisson(40), fixed(1000, 40), 150), tenant="reader")
    writers = labelled(workload(poisson(40, seed=1), fixed(20, 160), 150), tenant="writer")
    return merged(readers, writers)


def chats() -> list[Job]:
    return workload(poisson(20), sharegpt(max_model_len=1000), 120)


def questions() -> list[Job]:
    return shared_prefix(poisson(60), alpaca(), 300, num_prefixes=30, prefix_tokens=2000)


def hurried() -> list[Job]:
    return deadlines(poisson(9), 150, share=0.3, urgent=1, patient=30)


def conversations() -> list[Job]:
    lengths = lognormal(150, 150, 0.8)
    return multi_turn(poisson(12), lengths, 120, turns=8, think=8, system_tokens=500)


def one_by_one() -> list[Job]:
    return workload((100.0 * i for i in range(5)), lognormal(1000, 200, 0.5), 5)


def crowd() -> list[Job]:
    return workload(all_at_once(), sharegpt(), 500)


# --- studies ---


@dataclass(frozen=True)
class Study:
    """Two settings on the same jobs, and how a number of the one is related to that of the
    other."""

    name: str
    jobs: Callable[[], list[Job]]
    config: Config
    one: dict[str, Any]  # arguments of `simulate`, or fields of the config
    other: dict[str, Any]
    number: Callable[[Run], float]
    relation: Callable[[float, float], bool] = lt  # of the one to the other
    factor: float = 1.0  # times the other
    shared: dict[str, Any] = field(default_factory=dict)

    def measure(self, machine: Machine) -> tuple[float, float]:
        jobs = self.jobs()
        return self.number(self.run(jobs, machine, self.one)), self.number(
            self.run(jobs, machine, self.other)
        )

    def run(self, jobs: Sequence[Job], machine: Machine, own: dict[str, Any]) -> Run:
        options = self.shared | own
        names = {"scheduler_cls", "router_cls", "replicas"}
        arguments = {name: value for name, value in options.items() if name in names}
        fields = {name: value for name, value in options.items() if name not in names}
        return simulate(jobs, replace(self.config, **fields), machine, **arguments)

    def says(self, one: float, other: float) -> bool:
        return self.relation(one, self.factor * other)


def by(cls: type[Scheduler]) -> dict[str, Any]:
    return {"scheduler_cls": cls}


FCFS = by(Scheduler)
FOUR = {"replicas": 4}
TEN_SEATS = {"max_num_seqs": 10}
STUDIES = [
    Study("shortest first: shorter latency", guessed, SERVER, by(ShortestFirst), FCFS, latency),
    Study("shortest first: the last waits longer", guessed, SERVER, by(ShortestFirst), FCFS, last_first, gt),
    Study("with a limit: the last waits less", guessed, SERVER, by(WithALimit), by(ShortestFirst), last_first),
    Study("prompts first: pauses are longer", long_prompts, SERVER, by(PromptsFirst), FCFS, longest_pause, gt, 2.0),
    Study("prompts first: TTFT gains less than a tenth", long_prompts, SERVER, by(PromptsFirst), FCFS, late_first, gt, 0.9),
    Study("decodes first: pauses are shorter", long_prompts, SERVER, by(ShortestDecodesFirst), by(ShortestFirst), longest_pause, lt, 0.5),
    Study("bound for prompts: half of the pause", long_prompts, SERVER, by(PromptBound), FCFS, pause, lt, 0.5),
    Study("bound for prompts: first tokens later", long_prompts, SERVER, by(PromptBound), FCFS, first, gt),
    Study("bound for prompts: shorter latency", long_prompts, SERVER, by(PromptBound), FCFS, latency),
    Study("turns: the quiet tenant waits less", loud_and_quiet, SERVER, by(FairByTenant), FCFS, first_of_quiet),
    Study("turns: readers and writers are less equal", readers_and_writers, SERVER, by(FairByTenant), FCFS, jain),
    Study("no watermark: more preemptions", chats, SCARCE, by(NoWatermark), FCFS, preemptions, gt, 2.0),
    Study("high watermark: longer latency", chats, SCARCE, by(HighWatermark), FCFS, latency, gt),
    Study("most blocks as victim: more computed again", chats, SCARCE, by(MostBlocks), FCFS, computed_again, gt),
    Study("swap: the run is as long (2 %)", chats, SCARCE, {"preemption_mode": "swap"}, FCFS, seconds, gt, 0.98),
    Study("least served: more computed again", chats, SCARCE, by(LeastServed), by(NoWatermark), computed_again, gt),
    Study("least served: shorter latency", chats, SCARCE, by(LeastServed), by(NoWatermark), latency),
    Study("longest prefix: more hits", questions, LIBRARY, by(LongestPrefix), FCFS, hits, gt),
    Study("longest prefix: first tokens sooner", questions, LIBRARY, by(LongestPrefix), FCFS, first),
    Study("earliest deadline: more are met", hurried, SERVER, by(EarliestDeadline), FCFS, met, gt, 1.0, TEN_SEATS),
    Study("pushing out: more are met", hurried, SERVER, by(UrgentPushesOut), by(EarliestDeadline), met, gt, 1.0, TEN_SEATS),
    Study("prefix affinity: more hits", conversations, Config(model="qwen3-8b"), {"router_cls": PrefixAffinity}, {"router_cls": RoundRobin}, hits, gt, 1.2, FOUR),
    Study("prefix affinity: first tokens sooner", conversations, Config(model="qwen3-8b"), {"router_cls": PrefixAffinity}, {"router_cls": RoundRobin}, first, lt, 1.0, FOUR),
    Study("8 cards: a user alone waits less", one_by_one, LARGE, {"tensor_parallel_size": 8}, {}, latency, lt, 0.75),
    Study("8 cards: fewer tokens of each card", crowd, LARGE, {"tensor_parallel_size": 8}, {}, tokens_per_second, lt, 4.0),
]  # fmt: skip


# --- on machines that differ in what is not known ---

OVERLAPS = (0.0, 0.5, 1.0)
HOST_SECONDS = (0.3e-3, 3e-3)
FLOPS_SHARES = (0.3, 0.6)


def variants() -> dict[str, tuple[float, float, float]]:
    """Overlap, seconds of the host per step, and share of the FLOP/s; by a name."""
    return {
        f"overlap {overlap:g}, host {1e3 * host:g} ms, {share:g} of the FLOP/s": (
            overlap,
            host,
            share,
        )
        for overlap, host, share in itertools.product(OVERLAPS, HOST_SECONDS, FLOPS_SHARES)
    }


def changed(machine: str | Machine, overlap: float, host: float, share: float) -> Machine:
    base = MACHINES[machine] if isinstance(machine, str) else machine
    return replace(
        base,
        overlap=overlap,
        seconds_per_step=host,
        flops_share=share,
        attention_flops_share=share,
    )


def machines_in(path: str | Path) -> dict[str, Machine]:
    """The machines that `calibrate` of chapter 15 has written into a file."""
    found = json.loads(Path(path).read_bytes())["machines"]
    for fields in found.values():
        fields |= {"hardware": Hardware(*fields["hardware"]), "link": Link(*fields["link"])}
    return {name: Machine(**fields) for name, fields in found.items()}


def study_on(name: str, variant: tuple[float, float, float]) -> dict:
    """Its two numbers on a changed machine, and whether the answer is that of the chapter."""
    (study,) = (study for study in STUDIES if study.name == name)
    one, other = study.measure(changed("h100", *variant))
    return {"one": one, "other": other, "holds": study.says(one, other)}
