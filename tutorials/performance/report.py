"""What is made of the runs: medians, percentiles, the printed tables, and the JSON file."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from tutorials.performance.steps import BIN


def percentile(values: list[float], q: float) -> float | None:
    """With linear interpolation, as numpy does it."""
    if not values:
        return None
    ordered, at = sorted(values), (len(values) - 1) * q / 100
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at % 1)


def summary(result: dict, output_tokens: int, ours: dict | None) -> dict:
    """An engine's median run, the seconds of all, and over all runs the share of requests with our
    tokens."""
    if "error" in result:
        return {"error": result["error"]}
    runs, keys = result["runs"], ("version", "versions", "startup_seconds", "ceilings")
    run = sorted(runs, key=lambda run: run["seconds"])[(len(runs) - 1) // 2]
    report = {key: result[key] for key in keys if key in result} | {
        "seconds": [r["seconds"] for r in runs]
    }
    report["output_tokens_per_second"] = output_tokens / run["seconds"]
    report["output_tokens_per_second_range"] = [
        output_tokens / pick(report["seconds"]) for pick in (max, min)
    ]
    report["requests_per_second"] = len(run["answers"]) / run["seconds"]
    for i, name in enumerate(("ttft", "tpot"), 1):
        values = [answer[i] for answer in run["answers"] if answer[i] is not None]
        report |= {f"{name}_p{q}": percentile(values, q) for q in (50, 99)}
    if ours:
        pairs = [
            pair for a, b in zip(runs, ours["runs"]) for pair in zip(a["answers"], b["answers"])
        ]
        report["same_tokens"] = sum(a[0] == b[0] for a, b in pairs) / len(pairs)
    if "steps" in run:
        report |= {"roofline": run["roofline"], "steps": {"columns": BIN, **run["steps"]}}
    return report | run.get("stats", {})


def conditions(report: dict) -> str:
    """On what, and with which requests, the engines were measured."""
    arrivals = "{rate:g} per second" if report["rate"] else "all at the start"
    requests = "{requests} requests ({workload}, " + arrivals + "), {prompt_tokens:,} tokens in, "
    lengths = "{output_tokens:,} out; {cut_requests} cut to {max_model_len} tokens\n"
    setting = "{model} in {dtype} on {device}, temperature {temperature:g}"
    return (requests + lengths + setting).format(**report)


def engines_table(report: dict) -> str:
    """A line for each engine, then what our cache did, then the roofline."""
    engines = report["engines"]
    columns = [("output_tokens_per_second", ",.0f"), ("range", ""), ("requests_per_second", ",.2f")]
    columns += [(f"{name}_p{q}", ",.1f", 1000) for name in ("ttft", "tpot") for q in (50, 99)]
    columns += [("startup_seconds", ",.1f"), ("same_tokens", ".1%")]
    header = "engine|tokens/s|min-max|requests/s|TTFT ms p50|p99|TPOT ms p50|p99|start s|same"
    rows = {name: {"range": spread(engine, "-"), **engine} for name, engine in engines.items()}
    lines = [table(header, columns, rows)]
    lines += [f"{name}: {engine['error']}" for name, engine in engines.items() if "error" in engine]
    ours = engines["nanovllm"]
    lines.append(
        "\nnanovllm's cache: at most {kv_blocks_used_peak:,} of {kv_blocks:,} KV blocks used, "
        "{prefix_cache_hit_tokens:,} prompt tokens cached, {preemptions:,} preempted".format(**ours)
    )
    lines.append(f"nanovllm's steps, with {ceiling_text(ours['ceilings'])}:\n")
    columns = [("steps", ","), ("seconds", ",.2f"), ("floor_seconds", ",.2f")]
    columns += [("floor_share", ".0%"), ("host_share", ".1%")]
    lines.append(table("steps|count|seconds|floor s|floor|host", columns, ours["roofline"]))
    return "\n".join(lines)


def spread(engine: dict, separator: str) -> str:
    """Output tokens per second of the slowest and the fastest run."""
    return separator.join(
        f"{speed:,.0f}" for speed in engine.get("output_tokens_per_second_range", [])
    )


# --- tables ---


def aligned(rows: list[list[str]]) -> str:
    """Columns for a terminal: the first one to the left, all others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows))
    lines = [[name.ljust(first), *map(str.rjust, cells, others)] for name, *cells in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def markdown(rows: list[list[str]]) -> str:
    """The first row is the header."""
    header, *others = rows
    lines = [header, ["---"] * len(header), *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(header: str, columns: list[tuple], records: dict[str, dict]) -> str:
    """A line for each record; a column is its key, how to format it, and a factor."""

    def shown(value, spec: str, factor: float = 1) -> str:
        if value in (None, ""):
            return "-"
        return format(value if factor == 1 else value * factor, spec)

    rows = [header.split("|")]
    for name, record in records.items():
        rows.append([name, *(shown(record.get(key), *how) for key, *how in columns)])
    return aligned(rows)


def ceiling_text(ceilings: dict) -> str:
    copy, flops = ceilings["bytes_per_second"] / 1e9, ceilings["flops_per_second"] / 1e12
    return f"a copy at {copy:,.1f} GB/s and a matmul at {flops:,.3f} TFLOP/s"


def write_json(report: dict, path: Path) -> None:
    """Lists of numbers are on one line each, and no number has more than nine digits."""
    rounded = json.loads(json.dumps(report), parse_float=lambda x: float(f"{float(x):.9g}"))
    text = json.dumps(rounded, indent=2)
    text = re.sub(r"\[\n([\d\s,.e+-]*)\]", lambda match: f"[{' '.join(match[1].split())}]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")  # who is ended here leaves no half file
    beside.write_text(text + "\n")
    os.replace(beside, path)


def median(runs: list) -> Any:
    """Of runs with the same numbers, number by number: each run is one, or a dict of such."""
    if isinstance(runs[0], dict):
        return {name: median([run[name] for run in runs]) for name in runs[0]}
    return percentile(runs, 50)
