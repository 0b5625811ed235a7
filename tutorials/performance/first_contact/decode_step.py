"""Section 4: where the time of a decode step goes."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams
from nanovllm.schedule import Schedule
from nanovllm.step import StepInputs
from tutorials.performance.first_contact.engine import new_llm, random_prompts, timed, watch
from tutorials.performance.first_contact.section import Section
from tutorials.performance.machine import seconds_of
from tutorials.performance.report import percentile


def decode_step(section: Section) -> None:
    """A decode step of 256: wall and GPU time, kernels, replays of graphs, phases of the host."""
    sizes = section.sizes
    llm = decoding(section)
    sequences = [request.sequences[0] for request in llm.requests.values()]
    contexts = [len(seq) for seq in sequences]
    step = partial(llm.step, report=False)
    section.case("batch", lambda: {"sequences": len(sequences), "contexts": contexts})
    section.case("wall", partial(wall_time, step, sizes.steps))
    section.case("phases", partial(phases, llm, step, sizes.steps))
    section.case("kernels", partial(profiled, section, step))
    section.case("replays", partial(replays, section, llm))
    section.show("phase of the host|ms", [("ms", ",.3f")], milliseconds(section, "phases"))
    section.show("graph of|ms", [("ms", ",.3f")], milliseconds(section, "replays"))
    rows = {row["name"][:60]: row for row in section.cases.get("kernels", {}).get("kernels", [])}
    section.show("kernel|us per step|calls", [("us", ",.1f"), ("calls", ",.1f")], rows)
    wall = section.cases.get("wall", {}).get("ms_p50")
    busy = section.cases.get("kernels", {}).get("busy_ms")
    if wall and busy:
        idle = max(0, wall - busy)
        print(f"a step: wall {wall:.3f} ms; the device works {busy:.3f} ms, is idle {idle:.3f} ms")


def decoding(section: Section) -> LLM:
    """An engine whose sequences have computed their prompts, and do not end while measured."""
    sizes = section.sizes
    options = {"max_model_len": 4096} | sizes.options
    llm, _ = new_llm(section, dtype=section.dtype_name, attention_backend="triton", **options)
    params = SamplingParams(temperature=0.6, max_tokens=5 * sizes.steps + 10, ignore_eos=True)
    longest = sizes.context * 3 // 2  # then the mean is the context
    for prompt in random_prompts(llm, sizes.batch, longest):
        llm.add_request(prompt, params)
    sequences = [request.sequences[0] for request in llm.requests.values()]
    while any(seq.num_missing_tokens > 1 for seq in sequences):
        llm.step(report=False)
    return llm


def milliseconds(section: Section, name: str) -> dict[str, dict]:
    """The numbers of a case as records of a table."""
    return {str(key): {"ms": value} for key, value in section.cases.get(name, {}).items()}


def wall_time(step: Callable, count: int) -> dict:
    seconds: list[float] = []
    for _ in range(count):
        timed(step, seconds)()
    return {f"ms_p{q}": 1000 * (percentile(seconds, q) or 0) for q in (10, 50, 90)}


def phases(llm: LLM, step: Callable, count: int) -> dict:
    """Median milliseconds per step of each.

    `run` has those from `prepare` to `sample` in it, and the wait for tokens.
    """
    runner = llm.runner
    watched = {
        "schedule": (llm.scheduler, "schedule"),
        "run": (runner, "run"),
        "prepare": (runner, "prepare"),
        "_sampling": (runner, "_sampling"),
        "graphs.run": (runner.graphs, "run"),
        "padded": (runner.graphs, "padded"),
        "to": (StepInputs, "to"),
        "sample": (runner.ops, "sample"),
        "update": (llm.scheduler, "update"),
        "_deliver": (llm, "_deliver"),
    }
    log: dict[str, list[float]] = {label: [] for label in watched}
    with ExitStack() as patches:
        for label, (owner, name) in watched.items():
            patches.enter_context(watch(owner, name, log[label]))
        for _ in range(count):
            step()
    return {label: 1000 * (percentile(seconds, 50) or 0) for label, seconds in log.items()}


def profiled(section: Section, step: Callable) -> dict:
    """Time per step of the 12 longest kernels, and of all."""
    count = min(10, section.sizes.steps)
    activities = [ProfilerActivity.CPU]
    if not section.cpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(count):
            step()
    kind = DeviceType.CPU if section.cpu else DeviceType.CUDA
    rows = []
    for event in profiler.key_averages():
        if event.device_type == kind and not getattr(event, "is_user_annotation", False):
            total = event.self_cpu_time_total if section.cpu else event.self_device_time_total
            row = {"name": event.key, "us": total / count, "calls": event.count / count}
            rows.append(row)
    rows.sort(key=lambda row: -row["us"])
    return {"busy_ms": sum(row["us"] for row in rows) / 1000, "kernels": rows[:12]}


def replays(section: Section, llm: LLM) -> dict:
    """Milliseconds of a graph by the device's clock, with the first sequences of a real step."""
    runner = llm.runner
    real = runner.run
    medians: dict[int, float] = {}

    def median(size: int) -> float:
        graph = runner.graphs.replays[size]
        times = [seconds_of(graph, section.device) for _ in range(section.sizes.steps)]
        return 1000 * (percentile(times, 50) or 0)

    @torch.inference_mode()
    def replay_and_run(schedule: Schedule):
        for size in section.sizes.replays:
            if len(schedule.items) >= size:
                first = Schedule(items=schedule.items[:size])
                runner.graphs.run(runner.prepare(first), size)
                medians[size] = median(size)
        return real(schedule)

    with mock.patch.object(runner, "run", replay_and_run):
        llm.step(report=False)
    return medians
