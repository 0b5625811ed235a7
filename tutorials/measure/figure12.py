"""The main figure of the PagedAttention paper (figure 12), and what each part of this engine is
worth: simulated.

    python -m tutorials.measure.figure12 --trace AzureLLMInferenceTrace_conv.csv \
        --json tutorials/results/figure12.json

How many requests per second can a system serve before its answers become slow? Each system runs on
the same simulated GPU; they differ only in the scheduler and the block manager. The mean normalized
latency is the time from arrival to end, divided by the tokens of the answer. Below 1 second per
token, the paper says, a system sustains the load.

There are two loads. Chats: OPT-13B on an A100 with 40 GB as in the paper, 15,700 slots in the KV
cache (table 1), lengths with the means of ShareGPT (figure 11), 10 minutes of requests. Azure: a
recorded load with longer prompts, Qwen3-8B on an A100 with 80 GB, contexts of up to 16,384 tokens;
the gaps between its requests are scaled to the rate. It lasts a quarter of the time, since its
rates are higher.
"""

import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tutorials.arguments import experiment
from tutorials.baselines.replay import NUM_SLOTS
from tutorials.machine import environment
from tutorials.measure.ablations import (
    CACHE,
    PREEMPTION,
    ablation,
    ablation_table,
    chunk_variants,
    documents,
    saturating,
    watermarks,
)
from tutorials.measure.loads import Load, Options, chats, recorded, systems
from tutorials.report import markdown, write_json
from tutorials.simulation.metrics import summary

LIMITS = (1.0, 0.2)  # seconds per token: the paper's, and a stricter one
# sections 1 and 6.2: how many times the rate of each system vLLM sustains on ShareGPT, over three
# models
PAPER = {
    "Orca (Oracle)": (1.7, 2.7),
    "Orca (Max)": (2.7, 8.0),
}
# figure 13a, at 2 per s
PAPER_BATCH = {"Orca (Max)": 7.00, "Orca (Pow2)": 9.81, "Orca (Oracle)": 13.62, "paged": 30.42}


# --- the figure ---


@dataclass
class Curve:
    """The mean normalized latency of one system over the rate. Points are measured when they are
    needed."""

    load: Load
    system: Options
    points: dict[float, dict] = field(default_factory=dict)

    def latency(self, rate: float) -> float:
        if rate not in self.points:
            run = self.load.run(self.system, rate)
            self.points[rate] = {
                "requests": len(run.requests),
                "latency": summary(run)["normalized_latency"]["mean"],
                "batch": sum(len(request.token_times) for request in run.requests) / run.num_steps,
            }
        return self.points[rate]["latency"]

    def sustained(self, limit: float, tolerance: float = 0.1) -> float:
        """The highest rate with a mean normalized latency below the limit. Between the last two
        points of the bisection, the latency is taken as linear. Infinity, if there are too few
        requests for such a queue."""
        rate = self.load.lowest
        while self.latency(rate) < limit:
            rate *= 2
            if rate > 1000:
                return math.inf
        high = min(rate for rate in self.points if self.latency(rate) >= limit)
        low = max(rate for rate in self.points if rate < high)
        while high - low > tolerance * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.latency(middle) < limit else (low, middle)
        below, above = self.latency(low), self.latency(high)
        return low + (high - low) * (limit - below) / (above - below)


def figure(load: Load, all_systems: dict[str, Options]) -> dict[str, dict]:
    """The points of each system and the rates that it sustains."""
    result = {}
    for name, system in all_systems.items():
        curve = Curve(load, system)
        sustained = {str(limit): curve.sustained(limit) for limit in LIMITS}
        points = [{"rate": rate, **curve.points[rate]} for rate in sorted(curve.points)]
        result[name] = {"sustained": sustained, "points": points}
        print(f"  {name}: {sustained}", flush=True)
    return result


# --- what is shown ---


def rates_table(results: dict[str, dict], paper: bool) -> str:
    """The rate that each system sustains, and how many times as much the paged engine sustains."""
    header = [
        "",
        *(f"requests/s below {limit} s/token" for limit in LIMITS),
        "paged sustains",
        "in the paper",
    ]
    lines, best = [header[: 5 if paper else 4]], results["paged"]["sustained"]
    for name, result in results.items():
        rates = [result["sustained"][str(limit)] for limit in LIMITS]
        factor = f"{best[str(LIMITS[0])] / rates[0]:.1f} times"
        theirs = "{} to {} times".format(*PAPER[name]) if name in PAPER else ""
        lines.append([name, *(f"{rate:.2f}" for rate in rates), factor, theirs][: len(lines[0])])
    return markdown(lines)


def batch_table(results: dict[str, dict]) -> str:
    """How many requests are in a step at 2 per second, as in the paper's figure 13a, and when there
    are too many."""
    lines = [["", "requests in a step, 2 per s", "at most", "in the paper, 2 per s"]]
    for name, paper in PAPER_BATCH.items():
        batches = {point["rate"]: point["batch"] for point in results[name]["points"]}
        lines.append(
            [
                name,
                f"{batches[min(batches, key=lambda rate: abs(rate - 2))]:.1f}",
                f"{max(batches.values()):.1f}",
            ]
        )
        lines[-1].append(f"{paper:.1f}")
    return markdown(lines)


def sustained(report: dict) -> str:
    """Markdown: the request rates of figure 12, ours and the paper's."""
    lines = []
    for name, results in report["figure12"].items():
        lines += [f"{name}:", rates_table(results, paper=name.startswith("chats"))]
        if name.startswith("chats"):
            lines.append(batch_table(results))
    return "\n\n".join(lines)


SHOWN = (  # in the appendix: the loads on which it shows
    "prefix cache: ",
    "scarce memory: ",
    "chunks: Azure",
    "watermark: chats, all at once, no",
)


def chosen_ablations(report: dict) -> str:
    """Markdown: what single parts of the scheduler are worth."""
    parts = []
    for name, rows in report["ablations"].items():
        if name.startswith(SHOWN):
            parts += [f"{name[0].upper()}{name[1:]}:", ablation_table(rows)]
    return "\n\n".join(parts)


def show(report: dict) -> None:
    print(sustained(report))
    for name, rows in report["ablations"].items():
        print(f"\n{name}\n\n{ablation_table(rows)}")


def measure(trace: Path | None, minutes: float, model: Path) -> dict:
    """All of it. `model` is an empty directory."""
    chat, documented = chats(model, minutes), documents(minutes / 4)
    azure_load = recorded(trace, minutes / 4) if trace else None
    print("chats", flush=True)
    figures = {"chats, OPT-13B on an A100 with 40 GB": figure(chat, systems(2048, NUM_SLOTS))}
    if azure_load:
        print("Azure", flush=True)
        slots = int((0.9 * 80e9 - 16.4e9) / 147456)  # what the weights leave
        figures["Azure, Qwen3-8B on an A100 with 80 GB"] = figure(azure_load, systems(16384, slots))
    ablations = {
        "prefix cache: 8 questions per second about 8 texts": ablation(documented, CACHE, 8.0)
    }
    ablations["scarce memory: chats, 3.2 per second"] = ablation(chat, PREEMPTION, 3.2)
    ablations["chunks: chats, 2.5 per second"] = ablation(chat, chunk_variants(4096), 2.5)
    if azure_load:
        ablations["chunks: Azure, 5 per second"] = ablation(azure_load, chunk_variants(32768), 5.0)
    for name, (load, jobs) in saturating(chat, azure_load).items():
        for with_cache in (False, True):
            print(f"watermark: {name}", flush=True)
            title = f"watermark: {name}, {'prefix cache' if with_cache else 'no prefix cache'}"
            ablations[title] = watermarks(load, jobs, with_cache)
    return {"minutes": minutes, "figure12": figures, "ablations": ablations}


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument(
        "--trace", type=Path, help="CSV with TIMESTAMP, ContextTokens and GeneratedTokens"
    )
    parser.add_argument(
        "--minutes", type=float, default=10, help="how long chats arrive; Azure's a quarter of it"
    )
    args = parser.parse_args()
    report = environment() | {"device": "none: simulated"}
    with tempfile.TemporaryDirectory() as folder:
        report |= measure(args.trace, args.minutes, Path(folder))
    show(report)
    write_json(report, args.json)


if __name__ == "__main__":
    main()
