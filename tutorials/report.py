"""What is made of the runs: medians, percentiles, the printed tables, and the JSON file."""

import json
import math
import os
import re
from pathlib import Path
from statistics import median
from typing import Any


def percentile(values: list[float], q: float) -> float | None:
    """With linear interpolation, as numpy does it."""
    if not values:
        return None
    ordered, at = sorted(values), (len(values) - 1) * q / 100
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at % 1)


FOR_A_TABLE = 7  # rounds
OF_AN_ENGINE = ("version", "versions", "startup_seconds", "cpu_share", "idle_cpu_share", "few")


def summary(result: dict, ours: dict, output_tokens: int, is_greedy: bool) -> dict:
    """An engine's seconds in all rounds, its speed beside ours, and its latencies in the median
    round. Of ours also what was observed."""
    if "error" in result:
        return {"error": result["error"]}
    report = {key: result[key] for key in OF_AN_ENGINE if key in result}
    report["warmup_seconds"] = seconds_of(result["warm_up"])
    report["seconds"] = seconds_of(result["runs"])
    report |= speeds(report["seconds"], output_tokens) | latencies(result["runs"])
    if result is ours:
        if "roofline" in ours:  # not before all rounds have ended
            observed = ("observed_seconds", "ceilings", "roofline")
            report |= {key: ours[key] for key in observed} | ours["cache"]
        return report
    report |= ratios(report["seconds"], seconds_of(ours["runs"]))
    if is_greedy:
        report["same_tokens"] = share_of_same_tokens(result["runs"], ours["runs"])
    return report


def seconds_of(runs: list[dict]) -> list[float]:
    return [run["seconds"] for run in runs]


def speeds(seconds: list[float], output_tokens: int) -> dict:
    """Output tokens per second: the median, the slowest and the fastest round."""
    return {
        "output_tokens_per_second": output_tokens / median(seconds),
        "output_tokens_per_second_range": [output_tokens / end(seconds) for end in (max, min)],
    }


def latencies(runs: list[dict]) -> dict:
    """Of the requests of the median round, and how many were done in a second."""
    run = sorted(runs, key=lambda run: run["seconds"])[(len(runs) - 1) // 2]
    found = {"requests_per_second": len(run["answers"]) / run["seconds"]}
    for i, name in enumerate(("ttft", "tpot"), 1):
        values = [answer[i] for answer in run["answers"] if answer[i] is not None]
        found |= {f"{name}_p{q}": percentile(values, q) for q in (50, 99)}
    return found


def ratios(seconds: list[float], ours: list[float]) -> dict:
    """How many times as fast ours is, each time in the same round: the median, the least and the
    most."""
    times = [theirs / our for theirs, our in zip(seconds, ours)]
    return {"times_as_fast": median(times), "times_as_fast_range": [min(times), max(times)]}


def share_of_same_tokens(runs: list[dict], ours: list[dict]) -> float:
    """The share of requests that got the same tokens, over all rounds."""
    pairs = [pair for a, b in zip(runs, ours) for pair in zip(a["answers"], b["answers"])]
    return sum(a[0] == b[0] for a, b in pairs) / len(pairs)


def conditions(report: dict) -> str:
    """On what, with which requests, and how often the engines were measured."""
    arrivals = "{rate:g} per second" if report["rate"] else "all at the start"
    requests = "{requests} requests ({workload}, " + arrivals + "), {prompt_tokens:,} tokens in, "
    lengths = "{output_tokens:,} out; {cut_requests} cut to {max_model_len} tokens\n"
    setting = "{model} in {dtype} on {device}, temperature {temperature:g}\n"
    foreign = "; other programs used {foreign_cpu_share:.2f} processors meanwhile"
    return (requests + lengths + setting + rounds_text(report) + foreign).format(**report)


def rounds_text(report: dict) -> str:
    """How often each engine answered the requests."""
    text = f"{report['rounds']} round{'s' * (report['rounds'] > 1)}; the engines take turns"
    if report["rounds"] < FOR_A_TABLE:
        text += f" (a quick look: a table needs {FOR_A_TABLE})"
    return text


def engines_table(report: dict) -> str:
    """A line for each engine, then what our cache did, then the roofline."""
    engines = report["engines"]
    header = (
        "engine|tokens/s|min-max|ours is|min-max|requests/s|TTFT ms p50|p99|TPOT ms p50|p99|same"
    )
    columns = [("output_tokens_per_second", ",.0f"), ("range", "")]
    columns += [("ratio", ""), ("ratios", ""), ("requests_per_second", ",.2f")]
    columns += [(f"{name}_p{q}", ",.1f", 1000) for name in ("ttft", "tpot") for q in (50, 99)]
    columns += [("same_tokens", ".1%")]
    if report["cold"]:
        header += "|start s|1st round|2nd"
        columns += [("startup_seconds", ",.1f"), ("first", ",.0f"), ("second", ",.0f")]
    rows = {name: engine | cells(engine, report) for name, engine in engines.items()}
    lines = [table(header, columns, rows)]
    lines += [f"{name}: {engine['error']}" for name, engine in engines.items() if "error" in engine]
    for name, engine in engines.items():
        for count, speed in engine.get("few", {}).items():
            lines.append(f"{name}, the first {count} requests alone: {speed:,.0f} tokens/s")
    ours = engines["nanovllm"]
    if "roofline" not in ours:
        return "\n".join(lines)
    lines.append(
        "\nnanovllm's cache: at most {kv_blocks_used_peak:,} of {kv_blocks:,} KV blocks used, "
        "{prefix_cache_hit_tokens:,} prompt tokens cached, {preemptions:,} preempted".format(**ours)
    )
    lines.append(f"nanovllm's steps, with {ceiling_text(ours['ceilings'])}:\n")
    columns = [("steps", ","), ("seconds", ",.2f"), ("floor_seconds", ",.2f")]
    columns += [("floor_share", ".0%"), ("host_share", ".1%")]
    lines.append(table("steps|count|seconds|floor s|floor|host", columns, ours["roofline"]))
    return "\n".join(lines)


def cells(engine: dict, report: dict) -> dict:
    """What the table makes of an engine's numbers."""
    if "error" in engine:
        return {}
    speeds = [report["output_tokens"] / seconds for seconds in engine["warmup_seconds"]]
    found: dict = dict(zip(("first", "second"), speeds))
    found["range"] = spread(engine, "output_tokens_per_second", ",.0f", "-")
    if "times_as_fast" in engine:
        found["ratio"] = f"{engine['times_as_fast']:.2f}x"
        found["ratios"] = spread(engine, "times_as_fast", ".2f", "-")
    return found


def spread(engine: dict, name: str, spec: str, separator: str) -> str:
    """The least and the most of a number, over the rounds."""
    return separator.join(format(value, spec) for value in engine.get(f"{name}_range", []))


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
    """A line for each record, with its name. A column is a key, how to format its number, and a
    factor."""

    def shown(value: Any, spec: str, factor: float = 1) -> str:
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


def write_json(report: dict, path: Path | None) -> None:
    """Lists of numbers are on one line each, and no number has more than nine digits. Without a path
    nothing is written."""
    if path is None:
        return
    rounded = json.loads(json.dumps(report), parse_float=lambda x: float(f"{float(x):.9g}"))
    text = json.dumps(rounded, indent=2)
    text = re.sub(r"\[\n([\d\s,.e+-]*)\]", lambda match: f"[{' '.join(match[1].split())}]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")  # a process that is ended here leaves no half file
    beside.write_text(text + "\n", encoding="utf-8")
    os.replace(beside, path)
