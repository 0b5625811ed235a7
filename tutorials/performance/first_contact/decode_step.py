"""Section 4: where the time of a decode step goes."""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams, model_runner
from nanovllm.layers.sampler import Sampling
from nanovllm.schedule import Schedule
from nanovllm.step import StepInputs
from tutorials.performance.first_contact.kernels import randn
from tutorials.performance.first_contact.larger import larger_step
from tutorials.performance.first_contact.section import Section
from tutorials.performance.first_contact.start import (
    begin_decodes,
    new_llm,
    random_prompts,
    timed,
    watch,
)
from tutorials.performance.machine import seconds_of
from tutorials.performance.report import percentile

PAUSE = 10**7  # cycles of the GPU: some 5 ms


def decode_step(section: Section) -> None:
    """A decode step of 256: wall and GPU time, kernels, replays, phases; other steps beside it."""
    section.case("sampling", partial(sampling_times, section))
    section.show("sampling|ms", [("ms", ",.3f")], milliseconds(section, "sampling"))
    steps_of_engine(section)
    section.case("larger", partial(larger_step, section))
    print("larger model:", section.cases.get("larger"), flush=True)


def steps_of_engine(section: Section) -> None:
    """Of one engine, which is gone afterwards."""
    sizes = section.sizes
    made: list[LLM] = []
    section.case("start", lambda: made.append(decoding(section)) or {})
    if not made:
        return
    (llm,) = made
    sequences = [request.sequences[0] for request in llm.requests.values()]
    contexts = [len(seq) for seq in sequences]
    step = partial(llm.step, report=False)
    mixed = partial(mixed_step, llm, sizes.chunk)
    section.case("batch", lambda: {"sequences": len(sequences), "contexts": contexts})
    section.case("wall", partial(wall_time, step, sizes.steps))
    section.case("kernels", partial(profiled, section, step))
    section.case("phases", partial(phases, llm, step, sizes.steps))
    section.case("replays", partial(replays, section, llm))
    section.case("all but one stay", partial(leave, llm, len(sequences) - 1))
    section.case("mixed wall", partial(mixed_wall_time, mixed, sizes.steps))
    section.case("mixed kernels", partial(profiled, section, mixed))
    with mock.patch.object(llm.runner, "graphs", None):
        section.case("mixed wall, launched", partial(mixed_wall_time, mixed, sizes.steps))
    section.case("one stays", partial(leave, llm, 1))
    section.case("wall of one", partial(wall_time, step, sizes.steps))
    section.case("kernels of one", partial(profiled, section, step))
    show(section)


def show(section: Section) -> None:
    section.show("phase of the host|ms", [("ms", ",.3f")], milliseconds(section, "phases"))
    section.show("graph of|ms", [("ms", ",.3f")], milliseconds(section, "replays"))
    for kind in ("kernels", "mixed kernels"):
        rows = {row["name"][:60]: row for row in section.cases.get(kind, {}).get("kernels", [])}
        section.show(f"{kind}|us per step|calls", [("us", ",.1f"), ("calls", ",.1f")], rows)
    steps: dict[str, dict] = {}
    for name, wall, kernels in (
        ("all decode", "wall", "kernels"),
        ("all but one decode, and a chunk", "mixed wall", "mixed kernels"),
        ("the same without a recording", "mixed wall, launched", "mixed kernels"),
        ("one decodes", "wall of one", "kernels of one"),
    ):
        wall_ms = section.cases.get(wall, {}).get("ms_p50")
        busy_ms = section.cases.get(kernels, {}).get("busy_ms")
        steps[name] = {"wall": wall_ms, "busy": busy_ms}
        if wall_ms and busy_ms:
            steps[name]["idle"] = max(0, wall_ms - busy_ms)
    columns = [(name, ",.3f") for name in ("wall", "busy", "idle")]
    section.show("a step|wall ms|device works|is idle", columns, steps)


def decoding(section: Section) -> LLM:
    """An engine whose sequences have computed their prompts, and do not end while measured."""
    sizes = section.sizes
    options = {"max_model_len": 4096} | sizes.options
    llm, _ = new_llm(section, dtype=section.dtype_name, attention_backend="triton", **options)
    params = SamplingParams(temperature=0.6, max_tokens=12 * sizes.steps + 10, ignore_eos=True)
    longest = sizes.context * 3 // 2  # then the mean is the context
    begin_decodes(llm, random_prompts(llm, sizes.batch, longest), params)
    return llm


def leave(llm: LLM, count: int) -> dict:
    """Aborts all requests but so many."""
    for name in list(llm.requests)[count:]:
        llm.abort(name)
    llm.step(report=False)
    return {"requests": len(llm.requests)}


def mixed_step(llm: LLM, chunk: int) -> float:
    """Seconds of a step that also computes a new prompt, and ends it with its first token."""
    prompt = [random.randrange(llm.runner.vocab_size) for _ in range(chunk)]
    llm.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    before = llm.stats()["computed_tokens"]
    start = time.perf_counter()
    llm.step(report=False)
    seconds = time.perf_counter() - start
    computed = llm.stats()["computed_tokens"] - before
    expected = len(llm.requests) + chunk
    if computed != expected:
        raise RuntimeError(f"a mixed step has computed {computed} tokens, not {expected}")
    return seconds


def mixed_wall_time(mixed: Callable[[], float], count: int) -> dict:
    return percentiles([mixed() for _ in range(count)])


def sampling_times(section: Section) -> dict:
    """Milliseconds for a batch of logits, with and without filters."""
    from nanovllm.layers import triton_ops

    rows = section.sizes.rows
    vocab = section.sizes.vocab
    logits = 4 * randn(section, rows, vocab)
    numbers = torch.arange(rows, device=section.device)
    top_k = torch.full_like(numbers, 20)
    top_p = torch.full((rows,), 0.95, device=section.device)
    plain = Sampling(torch.ones_like(top_p), seed=numbers, position=numbers)
    short = replace(plain, top_k=top_k, max_top_k=20, all_have_top_k=True)
    kinds = {
        "plain": plain,
        "top_k 20": short,
        "top_k 20, top_p 0.95": replace(short, top_p=top_p),
        "top_p 0.95": replace(plain, top_p=top_p),
    }
    medians = {}
    for name, sampling in kinds.items():
        call = partial(triton_ops.sample, logits, sampling)
        call()  # which may compile
        times = [seconds_behind_a_pause(section, call) for _ in range(section.sizes.steps)]
        medians[name] = 1000 * (percentile(times, 50) or 0)
    return medians


def seconds_behind_a_pause(section: Section, call: Callable) -> float:
    """Of the call's kernels: while the GPU pauses, Python launches all of them, as it does while
    the model runs."""
    if not section.cpu:
        torch.cuda._sleep(PAUSE)
    return seconds_of(call, section.device)


def milliseconds(section: Section, name: str) -> dict[str, dict]:
    """The numbers of a case as records of a table; none where it has failed."""
    numbers = section.cases.get(name, {}).items()
    return {str(key): {"ms": value} for key, value in numbers if isinstance(value, float)}


def wall_time(step: Callable, count: int) -> dict:
    seconds: list[float] = []
    for _ in range(count):
        timed(step, seconds)()
    return percentiles(seconds)


def percentiles(seconds: list[float]) -> dict:
    return {f"ms_p{q}": 1000 * (percentile(seconds, q) or 0) for q in (10, 50, 90)}


def phases(llm: LLM, step: Callable, count: int) -> dict:
    """Median milliseconds per step of each.

    `launch` has those from `prepare` to `sample` in it; `collect` waits for the tokens.
    """
    runner = llm.runner
    watched = {
        "schedule": (llm.scheduler, "schedule"),
        "launch": (runner, "launch"),
        "prepare": (runner, "prepare"),
        "sampling_of": (model_runner, "sampling_of"),
        "graphs.run": (runner.graphs, "run"),
        "padded": (runner.graphs, "padded"),
        "to": (StepInputs, "to"),
        "sample": (runner.ops, "sample"),
        "collect": (model_runner, "collect"),
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
    """Milliseconds of a graph by the device's clock, with the first sequences of a real step.

    Several in a row, so that the launch of the first one hardly counts.
    """
    runner = llm.runner
    count = section.sizes.in_a_row
    real = runner.launch
    medians: dict[int, float] = {}

    def median(size: int) -> float:
        graph = runner.graphs.replays[size]

        def in_a_row() -> None:
            for _ in range(count):
                graph()

        times = [seconds_of(in_a_row, section.device) for _ in range(section.sizes.steps)]
        return 1000 * (percentile(times, 50) or 0) / count

    @torch.inference_mode()
    def replay_and_launch(schedule: Schedule):
        for size in section.sizes.replays:
            if len(schedule.items) >= size:
                first = Schedule(items=schedule.items[:size])
                runner.graphs.run(runner.prepare(first), size)
                medians[size] = median(size)
        return real(schedule)

    with mock.patch.object(runner, "launch", replay_and_launch):
        llm.step(report=False)
    return medians
