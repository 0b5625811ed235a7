"""Writes the tables of README, the appendix, chapters 12, 14, 15 and 17 to 20 and the handouts from the files beside it:
nobody types a number.

    python -m measure.tables

A table stands between <!-- table NAME FILE... --> and <!-- end of table -->. A test compares it
with the files.
"""

import ast
import json
import os
import re
from pathlib import Path

from measure import accuracy, sensitivity
from measure.seeds import handout_table
from tutorials.machine import ROOT
from tutorials.report import (
    conditions,
    engines_table,
    markdown,
    percentile,
    rounds_text,
    spread,
)
from tutorials.simulation import figure12, pairs
from tutorials.simulation.ablations import ablation_table

RESULTS = ROOT / "tutorials" / "results"
PAGES = [
    ROOT / "README.md",
    ROOT / "tutorials" / "appendix.md",
    ROOT / "tutorials" / "12_performance.md",
    ROOT / "tutorials" / "14_simulator.md",
    ROOT / "tutorials" / "15_believe.md",
    ROOT / "tutorials" / "17_serving.md",
    ROOT / "tutorials" / "18_parallel.md",
    ROOT / "tutorials" / "19_replicas.md",
    ROOT / "tutorials" / "20_vattention.md",
    *sorted((ROOT / "tutorials" / "assignments").glob("*/README.md")),
]
MARK = re.compile(
    r"(<!-- table (?P<name>\w+)(?P<files>[^>]*) -->\n)(?P<table>.*?)(<!-- end of table -->)",
    re.DOTALL,
)
ENGINES = {
    "nanovllm": "nanovllm",
    "vllm": "vLLM {}",
    "nanovllm-original": "nano-vllm {}",
    "hf": "transformers {}, `generate` on one padded batch",
    "hf-cb": "transformers {}, continuous batching",
}
MODELS = {"tiny_qwen3": "embedded model", "qwen3-0.6b-random": "Qwen3-0.6B"}


def speed(reports: list[dict], links: list[str]) -> str:
    """For README: what was run, and a line for each engine, the fastest on the first model
    above."""
    names = [MODELS.get(report["model"], report["model"]) for report in reports]
    lines = []
    for name, report, link in zip(names, reports, links):
        low, high = report["tokens"]
        work = f"{report['requests']} requests of {low} to {high} tokens in and out, {report['device']}"
        lines.append(
            f"- {name} in {report['dtype']}: {work}, {rounds_text(report)} ([all numbers]({link}))"
        )
    header = [""]
    for name in names:
        header += [f"{name}: tokens/s", "nanovllm is", "ready after"]
    rows = [header]
    first = reports[0]["engines"]
    for engine in sorted(first, key=lambda name: -first[name].get("output_tokens_per_second", 0)):
        cells = [ENGINES[engine].format(first[engine].get("version", ""))]
        for report in reports:
            cells += speed_cells(report["engines"].get(engine, {"error": "not run"}))
        rows.append(cells)
    return "\n".join([*lines, "", markdown(rows)])


def speed_cells(engine: dict) -> list[str]:
    """Output tokens per second, how many times as fast ours is, and seconds until it can answer.
    In brackets the least and the most of all rounds."""
    if "error" in engine:
        return [engine["error"], "-", "-"]
    speeds = spread(engine, "output_tokens_per_second", ",.0f", " to ")
    ratio = ""
    if "times_as_fast" in engine:
        ratios = spread(engine, "times_as_fast", ".2f", " to ")
        ratio = f"{engine['times_as_fast']:.2f} x as fast ({ratios})"
    speed = f"{engine['output_tokens_per_second']:,.0f} ({speeds})"
    return [speed, ratio, f"{engine['startup_seconds']:,.0f} s"]


def engines(reports: list[dict], links: list[str]) -> str:
    """For chapter 12 and the appendix: what bench.py printed."""
    (report,), (link,) = reports, links
    header = f"[{Path(link).name}]({link}), commit {report['commit']}:"
    return f"{header}\n\n```text\n{conditions(report)}\n\n{engines_table(report)}\n```"


def settings(reports: list[dict], links: list[str]) -> str:
    """For chapter 12: the same comparison with another dtype, instruction set, or company."""
    rows = [["", "nanovllm: tokens/s", "beside transformers", "beside vLLM"]]
    for report, link in zip(reports, links):
        name = MODELS.get(report["model"], report["model"])
        parts = [f"[{name}]({link})", report["dtype"], report["cpu_capability"]]
        if report["busy"]:
            parts.append(f"beside {report['busy']} endless loop")
        cells = [", ".join(parts), speed_cells(report["engines"]["nanovllm"])[0]]
        for engine in ("hf", "vllm"):
            cells.append(speed_cells(report["engines"].get(engine, {"error": "not run"}))[1])
        rows.append(cells)
    return markdown(rows)


def recovery(reports: list[dict], links: list[str]) -> str:
    """For the appendix: preemption of a request with 1,000 tokens, of two models."""
    header, lines = ["tokens per block"], []
    for report, link in zip(reports, links):
        name = MODELS.get(report["model"], report["model"])
        lines.append(f"- {name} in {report['dtype']}, {report['device']} ([all numbers]({link}))")
        header += [f"{name}: out", "in", "recompute"]
    rows = [header]
    chosen = [
        [measured for measured in report["preemption"] if measured["context"] == 1000]
        for report in reports
    ]
    for together in zip(*chosen):
        times = [
            m[f"{way}_seconds"] * 1e3
            for m in together
            for way in ("swap_out", "swap_in", "recompute")
        ]
        cells = [f"{t:,.{0 if t >= 10 else 1}f}" for t in times]
        rows.append([str(together[0]["block_size"]), *cells])
    return "\n".join([*lines, "", markdown(rows)])


def threads(reports: list[dict], links: list[str]) -> str:
    """For chapter 12: output tokens per second of the embedded model, quiet and busy."""
    (report,), (link,) = reports, links
    about = (
        f"Embedded model, {report['device']}, commit {report['commit']} ([all numbers]({link})):"
    )
    rows = [["machine, threads", "8 requests", "64 requests"]]
    for setting, speeds in report["threads"].items():
        cells = [
            f"{percentile(s, 50):,.0f} ({min(s):,.0f} to {max(s):,.0f})" for s in speeds.values()
        ]
        rows.append([setting, *cells])
    return f"{about}\n\n{markdown(rows)}"


def host(reports: list[dict], links: list[str]) -> str:
    """For the appendix: CPU time of the host's part of a decode step, by commit, and its phases in
    the last one."""
    (report,), (link,) = reports, links
    names = [name for name in report["host"] if name != "this"]
    phases = [phase for phase in next(iter(report["host"]["this"].values())) if phase != "step"]
    about = f"{report['device']}, ms per step by commit, and its parts ([all numbers]({link})):"
    commits = [*names, report["commit"]]
    rows = [["sequences, max_model_len", *commits, *(f"`{phase}`" for phase in phases)]]
    for case, now in report["host"]["this"].items():
        times = [report["host"][name][case]["step"] for name in names]
        times += [now["step"], *(now[phase] for phase in phases)]
        rows.append([case, *(f"{1e3 * seconds:.2f}" for seconds in times)])
    return f"{about}\n\n{markdown(rows)}"


def queue(reports: list[dict], links: list[str]) -> str:
    """For the appendix: what a step, an abort and a failed step take while requests wait."""
    (report,), _ = reports, links
    names = list(next(iter(report["queue"].values())))
    rows = [["requests that wait", *names]]
    for num_waiting, seconds in report["queue"].items():
        rows.append([num_waiting, *(f"{1e3 * seconds[name]:,.2f}" for name in names)])
    return markdown(rows)


def error(reports: list[dict], links: list[str]) -> str:
    """For chapter 15: how far the simulator is from real runs, over all loads."""
    (report,), (link,) = reports, links
    loads = f"{len(report['workloads'])} loads, each {report['repeat']} times in reality"
    header = f"Embedded model in float32, {report['device']}, commit {report['commit']}; {loads} ([all numbers]({link})):"
    rows = [["", "error with its sign", "error", "the largest", "between real runs"]]
    for metric, found in accuracy.totals(report["workloads"]).items():
        cells = [f"{found[key]:.1%}" for key in ("mean_error", "worst_error", "mean_noise")]
        name = accuracy.METRICS.get(metric, "all but the total time")
        rows.append([name, f"{found['signed_error']:+.1%}", *cells])
    return f"{header}\n\n{markdown(rows)}"


def policy_pairs(reports: list[dict], links: list[str]) -> str:
    """For chapter 15: pairs of policies, real and simulated."""
    (report,), (link,) = reports, links
    about = f"{report['device']}, commit {report['commit']} ([all numbers]({link}))."
    marks = "Measured, simulated; a star: clear; an exclamation mark: the wrong sign."
    return f"{about} {marks}\n\n{pairs.table(report['pairs'])}"


def sensitive(reports: list[dict], links: list[str]) -> str:
    """For chapter 15: studies and assignments on twelve machines."""
    (report,), (link,) = reports, links
    about = f"Simulated, commit {report['commit']} ([all numbers]({link})):"
    return f"{about}\n\n{sensitivity.table(report)}"


def real_and_simulated(reports: list[dict], links: list[str]) -> str:
    """For chapter 15: routers of two real replicas, and of two simulated ones."""
    (report,), (link,) = reports, links
    rounds = len(report["rounds"]["real"]["RoundRobin"])
    users = f"{report['users']} users with {report['turns']} turns each, medians of {rounds} rounds"
    about = f"{users}, {report['device']}, commit {report['commit']} ([all numbers]({link})):"
    header = ["router", "hits: real", "simulated", "TTFT mean (ms): real", "simulated"]
    rows = [[*header, "turns/s: real", "simulated"]]
    for name, real in report["runs"].items():
        both = real, report["simulated"][name]
        cells = [f"{run['hit_rate']:.0%}" for run in both]
        cells += [f"{run['ttft_ms']['mean']:.0f}" for run in both]
        rows.append([name, *cells, *(f"{run['turns_per_second']:.1f}" for run in both)])
    return f"{about}\n\n{markdown(rows)}"


def sustained(reports: list[dict], links: list[str]) -> str:
    """For chapter 14: the request rates of figure 12, ours and the paper's."""
    (report,), (link,) = reports, links
    lines = [f"Commit {report['commit']} ([all numbers]({link})):"]
    for name, systems in report["figure12"].items():
        lines += ["", f"{name}:", "", figure12.rates_table(systems, paper=name.startswith("chats"))]
        if name.startswith("chats"):
            lines += ["", figure12.batch_table(systems)]
    return "\n".join(lines)


def ablations(reports: list[dict], links: list[str]) -> str:
    """For chapter 14: what single parts of the scheduler are worth, on the loads on which it
    shows."""
    (report,), (link,) = reports, links
    shown = (
        "prefix cache: ",
        "scarce memory: ",
        "chunks: Azure",
        "watermark: chats, all at once, no",
    )
    parts = [f"[All numbers]({link}), also of other loads and with a prefix cache."]
    for name, rows in report["ablations"].items():
        if name.startswith(shown):
            parts += [f"{name[0].upper()}{name[1:]}:", ablation_table(rows)]
    return "\n\n".join(parts)


def simulator_speed(reports: list[dict], links: list[str]) -> str:
    """For chapter 14: how long the whole Azure trace takes."""
    (report,), (link,) = reports, links
    about = f"{report['device']}, commit {report['commit']} ([all numbers]({link})):"
    rows = [
        [
            "19,366 requests arrive",
            "of the server",
            "steps",
            "sequences in a step",
            "processor time",
            "us per step",
        ]
    ]
    for name, run in report["runs"].items():
        seconds = run["processor_seconds"]
        rows.append([
            name,
            f"{run['simulated_seconds']:,.0f} s",
            f"{run['steps']:,}",
            f"{run['sequences_in_a_step']:.0f}",
            f"{seconds:.0f} s",
            f"{seconds / run['steps'] * 1e6:,.0f}",
        ])  # fmt: skip
    return f"{about}\n\n{markdown(rows)}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"


def eight_clients(reports: list[dict], links: list[str]) -> str:
    """For chapter 17: when each of eight clients sees its first text."""
    (report,), (link,) = reports, links
    about = (
        f"Embedded model, {report['tokens']} tokens per answer, {report['device']}, "
        f"commit {report['commit']}, the median of {report['repeat']} rounds ([all numbers]({link})):"
    )
    clients = (0, 3, 7)
    rows = [["ms until the first text", "1st client", "4th", "8th", "all answers (s)", "tokens/s"]]
    for name, numbers in sorted(report["eight"].items(), key=lambda item: item[0] != "naive"):
        firsts = [milliseconds(numbers["firsts"][i]) for i in clients]
        speed = f"{numbers['output_tokens_per_second']:,.0f}"
        rows.append([name, *firsts, f"{numbers['seconds']:.2f}", speed])
    return f"{about}\n\n{markdown(rows)}"


def under_load(reports: list[dict], links: list[str]) -> str:
    """For chapter 17: latency at rising rates."""
    (report,), (link,) = reports, links
    about = f"{report['device']}, commit {report['commit']}, medians of {report['repeat']} rounds"
    header = ["requests per second", "server", "TTFT p50 (ms)", "p99"]
    rows = [[*header, "between tokens p50 (ms)", "p99", "tokens/s"]]
    names = sorted(report["load"], key=["nanovllm", "vllm", "naive"].index)
    for rate in [row["rate"] for row in report["load"]["nanovllm"]]:
        for name in names:
            for row in report["load"][name]:
                if row["rate"] == rate:
                    cells = [
                        milliseconds(row[key]) if key in row else "-"
                        for key in ("ttft_p50", "ttft_p99", "gap_p50", "gap_p99")
                    ]
                    speed = f"{row['output_tokens_per_second']:,.0f}"
                    rows.append([f"{rate:g}", name, *cells, speed])
    return f"{about} ([all numbers]({link})):\n\n{markdown(rows)}"


def event_loop(reports: list[dict], links: list[str]) -> str:
    """For chapter 17: how late the event loop is, and what of it is its own work."""
    (report,), _ = reports, links
    header = ["requests per second", "loop late: p99 (ms)", "most"]
    rows = [[*header, "idle process late: p99", "most", "loop busy: p99", "most"]]
    for name, numbers in report["loop"].items():
        cells = [
            f"{1e3 * numbers[f'{kind}_{which}']:.1f}"
            for kind in ("late", "idler_late", "busy")
            for which in ("p99", "most")
        ]
        rows.append([name, *cells])
    return markdown(rows)


def overloaded(reports: list[dict], links: list[str]) -> str:
    """For chapter 17: a queue without a bound, and with one."""
    (report,), _ = reports, links
    run = report["overload"]
    rate = f"{run['rate']:g} requests per second"
    rows = [[rate, "refused", "TTFT p50 (s)", "p99", "tokens/s"]]
    bounds = {"unbounded": "no bound", "bounded": f"at most {run['bounded']} wait"}
    for name, text in bounds.items():
        numbers = run["runs"][name]
        share = f"{numbers['refused'] / numbers['requests']:.0%}"
        first = [f"{numbers[f'ttft_p{q}']:.1f}" for q in (50, 99)]
        rows.append([text, share, *first, f"{numbers['output_tokens_per_second']:,.0f}"])
    return markdown(rows)


def streams_beside_generate(reports: list[dict], links: list[str]) -> str:
    """For chapter 17: 64 requests at once, through servers and without one."""
    rows = [["64 requests at once", "tokens/s", "of generate's"]]
    for report in reports:
        for name, numbers in report["together"].items():
            low, high = numbers["range"]
            speed = f"{numbers['output_tokens_per_second']:,.0f} ({low:,.0f} to {high:,.0f})"
            name = f"{report['model']}: {name}"
            rows.append([name, speed, f"{numbers['of_generate']:.0%}"])
    return markdown(rows)


def ranks(reports: list[dict], links: list[str]) -> str:
    """For chapter 18: two ranks beside one, and what they say to each other."""
    (report,), (link,) = reports, links
    about = (
        f"Embedded model, prompts of {report['prompt']} tokens, {report['tokens']} tokens per answer, "
        f"{report['device'].split(',')[0]}, commit {report['commit']}, medians of "
        f"{report['repeat']} runs ([all numbers]({link})):"
    )
    one, two = report["runs"].values()
    counts = [name for name in two if name.isdigit()]
    rows = [["", *(f"{count} requests" for count in counts)]]
    for name, run in report["runs"].items():
        rows.append([f"{name}: tokens/s", *(f"{run[i]['tokens_per_second']:,.0f}" for i in counts)])
    words = {
        "pack": "to pack a step",
        "tell": "to tell it",
        "add_up": "an all-reduce, 11 in a step",
        "gather": "to gather the logits",
    }
    for name, text in words.items():
        rows.append([f"{text} (ms)", *(f"{two[i][f'{name}_us'] / 1e3:.2f}" for i in counts)])
    floor = {name: f"{value / 1e3:.2f}" for name, value in two["floor"].items()}
    alone = (
        f"Gloo alone, between two processes that do nothing else: {floor['tell_us']} ms to tell, "
        f"{floor['add_up_1_us']} and {floor['add_up_256_us']} ms for an all-reduce of 1 and of 256 rows."
    )
    return f"{about}\n\n{markdown(rows)}\n\n{alone}"


TPOT = ("per token p50 (ms)", "p99")
LINK_NAMES = {"nvlink": "NVLink", "pcie": "PCIe", "network": "network"}


def split(reports: list[dict], links: list[str]) -> str:
    """For chapter 19: Qwen3-32B on one to eight devices, one user alone and as many as possible."""
    (report,), (link,) = reports, links
    rows = [
        [
            "H100s",
            "link",
            "alone: TTFT (ms)",
            "per token",
            "full: tokens/s",
            "of each H100",
            "preempted",
        ]
    ]
    for name, one in report["ranks"].items():
        num_ranks, wire = name.split()
        alone = [f"{one['ttft_ms']:.0f}", f"{one['tpot_ms']:.1f}"]
        speeds = [f"{one[key]:,.0f}" for key in ("tokens_per_second", "per_device")]
        wire = "-" if num_ranks == "1" else LINK_NAMES[wire]
        rows.append([num_ranks, wire, *alone, *speeds, str(one["preemptions"])])
    return f"Simulated, commit {report['commit']} ([all numbers]({link})):\n\n{markdown(rows)}"


def copies(reports: list[dict], links: list[str]) -> str:
    """For chapter 19: sixteen devices as many small replicas or few large ones."""
    (report,), _ = reports, links
    rows = [["requests/s", "replicas", "H100s of each", "TTFT p50 (ms)", "p99", *TPOT]]
    for name, one in report["shapes"].items():
        rate, count = name.split()
        rows.append([rate, count, str(16 // int(count)), *first_and_later(one)])
    return markdown(rows)


def first_and_later(one: dict) -> list[str]:
    """Milliseconds: TTFT of half of all and of 99 in 100, then those per token."""
    first = [f"{one['ttft_ms'][q]:,.0f}" for q in ("p50", "p99")]
    return first + [f"{one['tpot_ms'][q]:.1f}" for q in ("p50", "p99")]


def routed(reports: list[dict], links: list[str]) -> str:
    """For chapter 19: three loads and three routers, on four simulated replicas."""
    (report,), (link,) = reports, links
    rows = [["load, router", "hits", "TTFT p50 (ms)", "p99", *TPOT]]
    for name, one in report["routers"].items():
        rows.append([name, f"{one['hit_rate']:.0%}", *first_and_later(one)])
    return f"Simulated, commit {report['commit']} ([all numbers]({link})):\n\n{markdown(rows)}"


def bounds(reports: list[dict], links: list[str]) -> str:
    """For chapter 19: how far a replica may be ahead of the others."""
    (report,), _ = reports, links
    rows = [["load, `most_ahead`", "hits", "TTFT p50 (ms)", "p99", "busiest of 4 serves"]]
    for name, one in report["bounds"].items():
        load, most = name.split()
        times = [f"{one['ttft_ms'][q]:,.0f}" for q in ("p50", "p99")]
        most = "no bound" if int(most) >= 10**9 else most
        share = f"{one['most_requests'] / 4:.0%}"
        rows.append([f"{load}, {most}", f"{one['hit_rate']:.0%}", *times, share])
    return markdown(rows)


def least_shares(reports: list[dict], links: list[str]) -> str:
    """For chapter 19: how much of a prompt a replica must hold to be chosen for it."""
    (report,), _ = reports, links
    head = ["load, `least_share`", "hits", "TTFT p50 (ms)", "p99", *TPOT, "busiest of 4 serves"]
    rows = [head]
    for name, one in report["least_shares"].items():
        load, least = name.split()
        share = f"{one['most_requests'] / 4:.0%}"
        rows.append([f"{load}, {least}", f"{one['hit_rate']:.0%}", *first_and_later(one), share])
    return markdown(rows)


def real_replicas(reports: list[dict], links: list[str]) -> str:
    """For chapter 19: two real replicas on a CPU."""
    (report,), (link,) = reports, links
    about = (
        f"Embedded model, two replicas, {report['users']} users with {report['turns']} turns each, "
        f"{report['device']}, commit {report['commit']} ([all numbers]({link})):"
    )
    rows = [["router", "hits", "TTFT p50 (ms)", "p90", "p99", "turns/s"]]
    for name, run in report["runs"].items():
        times = [f"{run['ttft_ms'][q]:,.0f}" for q in ("p50", "p90", "p99")]
        rows.append([name, f"{run['hit_rate']:.0%}", *times, f"{run['turns_per_second']:.1f}"])
    return f"{about}\n\n{markdown(rows)}"


CHOSEN_PAGES = [
    "software",
    "4 KiB, all layers",
    "64 KiB, a page for each layer",
    "256 KiB, a page for each layer",
    "2 MiB, all layers",
    "2 MiB, all layers, unpadded",
    "2 MiB, a page for each layer",
    "2 MiB, keys and values apart",
]
MANY_KEYS = {
    "qwen3-0.6b": ["4 of 4,000", "16 of 1,000", "16 of 200 to 1,800", "64 of 250"],
    "tiny-qwen3": ["64 of 1,000", "64 of 100 to 1,900"],
}


def vattention(reports: list[dict], links: list[str]) -> str:
    """For chapter 20: the parts of decode steps that have many keys to read, and their memory."""
    (report,), (link,) = reports, links
    about = f"{report['device']}, commit {report['commit']} ([all numbers]({link})):"
    header = ["sequences of tokens", "engine, tokens per block", "step", "attention"]
    rows = [[*header, "of it gather", "mapping", "µs per new block", "empty memory"]]
    for model, chosen in MANY_KEYS.items():
        for case in report["vattention"][model]:
            name = f"{case['sequences']} of {case['context']}"
            if name not in chosen:
                continue
            name = "embedded model: " * (model == "tiny-qwen3") + name
            for engine, parts in case["engines"].items():
                times = [1e3 * parts[kind] for kind in ("total", "attention", "gather", "mapping")]
                cells = [f"{ms:,.{0 if ms >= 100 else 1 if ms >= 10 else 2}f}" for ms in times]
                each = parts["per_new_block"]
                cells.append("" if each is None else f"{1e6 * each:,.0f}")
                cells.append(f"{1 - parts['bytes_used'] / parts['bytes_held']:.0%}")
                rows.append([name, engine, *cells])
    return f"{about}\n\n{markdown(rows)}"


def pages(reports: list[dict], links: list[str]) -> str:
    """For chapter 20: what pages waste, of chosen sizes and layouts."""
    (report,), (link,) = reports, links
    loads = list(report["pages"])
    about = f"{report['memory_bytes'] / 1e9:.0f} GB for the cache, commit {report['commit']}"
    names = [name.partition(",")[0] for name in loads]
    kinds = ("tokens", "padding", "empty", "running")
    header = ["pages", "tokens per block", *(f"{n}: {kind}" for n in names for kind in kinds)]
    rows = [header]
    for layout in CHOSEN_PAGES:
        cells = [layout, f"{report['pages'][loads[0]]['layouts'][layout]['block_size']:,}"]
        for load in loads:
            found = report["pages"][load]["layouts"][layout]
            cells += [f"{found[kind]:.1%}" for kind in kinds[:3]]
            cells.append(f"{found['running']:.0f}")
        rows.append(cells)
    return f"{about} ([all numbers]({link})):\n\n{markdown(rows)}"


def tried(reports: list[dict], links: list[str]) -> str:
    """For a handout: what was tried for the assignment, on many seeds."""
    return handout_table(*reports)


def topics(page: Path) -> str:
    """The folders of the package: the first sentences of their docstrings, and their chapters."""
    rows = [["Folder", "Topic", "Chapter"]]
    for file in sorted((ROOT / "nanovllm").glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(file.read_text()))
        if text:
            chapters = []
            for name in re.findall(r"\d\d_\w+", text):
                link = os.path.relpath(ROOT / "tutorials" / f"{name}.md", page.parent)
                chapters.append(f"[{name[:2]}]({link})")
            rows.append([f"`{file.parent.name}/`", first_sentence(text), ", ".join(chapters)])
    return markdown(rows)


def core(page: Path) -> str:
    """The modules of the core, with the first sentences of their docstrings."""
    rows = [["Module", "What it is about"]]
    for folder in ("", "layers/", "models/"):
        for file in sorted((ROOT / "nanovllm" / folder).glob("*.py")):
            sentence = ast.get_docstring(ast.parse(file.read_text()))
            if sentence and not file.name.startswith("__"):
                rows.append([f"`{folder}{file.name}`", first_sentence(sentence)])
    return markdown(rows)


def first_sentence(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


HOUSE = {"topics": topics, "core": core}  # from the package itself
TABLES = {
    "speed": speed,
    "engines": engines,
    "settings": settings,
    "recovery": recovery,
    "threads": threads,
    "host": host,
    "queue": queue,
    "error": error,
    "policy_pairs": policy_pairs,
    "sensitive": sensitive,
    "real_and_simulated": real_and_simulated,
    "sustained": sustained,
    "ablations": ablations,
    "simulator_speed": simulator_speed,
    "eight_clients": eight_clients,
    "under_load": under_load,
    "event_loop": event_loop,
    "overloaded": overloaded,
    "streams_beside_generate": streams_beside_generate,
    "ranks": ranks,
    "split": split,
    "copies": copies,
    "routed": routed,
    "bounds": bounds,
    "least_shares": least_shares,
    "real_replicas": real_replicas,
    "vattention": vattention,
    "tried": tried,
    "pages": pages,
}


def written(text: str, page: Path) -> str:
    """The text of a page with its tables as the files have them now."""

    def table(mark: re.Match) -> str:
        paths = [RESULTS / f"{name}.json" for name in mark["files"].split()]
        links = [os.path.relpath(path, page.parent) for path in paths]
        reports = [json.loads(path.read_text()) for path in paths]
        if mark["name"] in HOUSE:
            return f"{mark[1]}{HOUSE[mark['name']](page)}\n{mark[5]}"
        return f"{mark[1]}{TABLES[mark['name']](reports, links)}\n{mark[5]}"

    return MARK.sub(table, text)


def main() -> None:
    for page in PAGES:
        before = page.read_text()
        after = written(before, page)
        if after != before:
            page.write_text(after)
            print("rewritten:", page.relative_to(ROOT))


if __name__ == "__main__":
    main()
