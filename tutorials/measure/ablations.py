"""What each part of this engine is worth: a load with it, without it, or with another size."""

from nanovllm.scheduler import Scheduler
from nanovllm.simulator import Job, Run
from tutorials.measure.loads import A100_80GB, Load, Options, PromptsFirst, WholePrompts, run
from tutorials.report import markdown
from tutorials.simulation.metrics import summary
from tutorials.simulation.workloads import (
    all_at_once,
    lognormal,
    poisson,
    shared_prefix,
    sharegpt,
    workload,
)


def measured(run: Run) -> dict:
    """What the tables of ablations show. "again": tokens computed again after a preemption, as a
    share of all."""
    report = summary(run)
    return {
        "seconds": report["seconds"],
        "steps": report["steps"],
        "latency": report["latency"]["mean"],
        "normalized": report["normalized_latency"]["mean"],
        "ttft_p50": report["ttft"]["p50"],
        "ttft_p99": report["ttft"]["p99"],
        "between_p99": report["between_tokens"]["p99"],
        "preemptions": report["preemptions"],
        "again": report["tokens_computed_again"] / run.num_computed_tokens,
    }


def ablation(load: Load, variants: dict[str, Options], rate: float) -> dict[str, dict]:
    return {name: measured(load.run(variant, rate)) for name, variant in variants.items()}


def chunk_variants(longest: int) -> dict[str, Options]:
    whole = {"max_num_batched_tokens": longest}
    return {
        **{
            f"chunks, {budget} tokens per step": {"max_num_batched_tokens": budget}
            for budget in (512, 2048, 8192)
        },
        "whole prompts beside decodes": whole | {"scheduler_cls": WholePrompts},
        "whole prompts, alone": whole | {"scheduler_cls": PromptsFirst},
    }


CACHE = {"prefix cache": {"enable_prefix_caching": True}, "no prefix cache": {}}
PREEMPTION = {
    "recompute": {},
    "recompute, prefix cache": {"enable_prefix_caching": True},
    "swap": {"preemption_mode": "swap", "swap_gib": 16},
    "swap, prefix cache": {
        "preemption_mode": "swap",
        "swap_gib": 16,
        "enable_prefix_caching": True,
    },
}


def documents(minutes: float) -> Load:
    """Questions about eight texts of 1,024 tokens, the popular ones more often."""

    def jobs(rate: float) -> list[Job]:
        count = max(500, round(60 * minutes * rate))
        return shared_prefix(poisson(rate), sharegpt(max_model_len=1024), count, prefix_tokens=1024)

    options = dict(
        model="qwen3-8b",
        max_model_len=4096,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    return Load(jobs, A100_80GB, options, lowest=1.0)


def watermarks(load: Load, jobs: list[Job], with_cache: bool) -> dict[str, dict]:
    """The same jobs with different parts of the cache kept free by admission. Only memory limits
    how many run."""
    rows = {}
    for watermark in (0.0, 0.01, 0.02, 0.05, 0.1):
        scheduler_cls = type("Scheduler", (Scheduler,), {"watermark": watermark})
        system = dict(
            scheduler_cls=scheduler_cls, enable_prefix_caching=with_cache, max_num_seqs=1024
        )
        rows[f"{watermark:.0%}"] = measured(run(jobs, load.machine, load.options | system))
    return rows


def saturating(chat: Load, azure_load: Load | None) -> dict[str, tuple[Load, list[Job]]]:
    """More requests than there is memory for."""
    long = lognormal(100, 600, max_model_len=2048)
    loads = {
        "chats, all at once": (chat, workload(all_at_once(), sharegpt(), 1000)),
        "chats, 3.2 per second": (chat, chat.jobs(3.2)),
        "long outputs, all at once": (chat, workload(all_at_once(), long, 600)),
    }
    if azure_load:
        loads["Azure, all at once"] = (
            azure_load,
            [job._replace(time=0.0) for job in azure_load.jobs(1e9)[:1500]],
        )
    return loads


# --- what is shown ---

COLUMNS = (  # header, key, format
    ("total (s)", "seconds", ",.0f"),
    ("steps", "steps", ",d"),
    ("latency, mean (s)", "latency", ",.1f"),
    ("s/token, mean", "normalized", ".3f"),
    ("TTFT p50 (s)", "ttft_p50", ".2f"),
    ("TTFT p99 (s)", "ttft_p99", ".2f"),
    ("between tokens p99 (s)", "between_p99", ".3f"),
    ("preempted", "preemptions", ",d"),
    ("computed again", "again", ".1%"),
)


def ablation_table(rows: dict[str, dict]) -> str:
    header = ["", *(name for name, _, _ in COLUMNS)]
    return markdown(
        [
            header,
            *([name, *(format(row[k], f) for _, k, f in COLUMNS)] for name, row in rows.items()),
        ]
    )
