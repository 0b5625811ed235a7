"""Where the time of a decode step goes."""

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
from tutorials.machine import seconds_of
from tutorials.measure.first_contact.section import Section, milliseconds, run, show
from tutorials.measure.first_contact.start import (
    Watched,
    begin_decodes,
    leave,
    new_llm,
    percentiles,
    random_prompts,
    wall_time,
)
from tutorials.report import percentile

PAUSE = 10**7  # cycles of the GPU: some 5 ms


def decode_step(section: Section) -> None:
    """A decode step of 256: wall and GPU time, kernels, replays, phases; other steps beside it."""
    times = section.case("sampling", partial(sampling_times, section))
    show("sampling|ms", [("ms", ",.3f")], milliseconds(times))
    steps_of_engine(section)


def steps_of_engine(section: Section) -> None:
    """Of one engine, which is gone afterwards."""
    sizes = section.sizes
    made: list[LLM] = []
    section.case("start", lambda: made.append(decoding(section)) or {})
    if not made:
        return
    (llm,) = made
    step = partial(llm.step, report=False)
    mixed = partial(mixed_step, llm, sizes.chunk)
    section.case("batch", partial(contexts_of, llm))
    show_step(section, "all decode", partial(wall_time, step, sizes.steps), step)
    phases = section.case("phases", partial(phases_of, llm, step, sizes.steps))
    show("phase of the host|ms", [("ms", ",.3f")], milliseconds(phases))
    times = section.case("replays", partial(replays, section, llm))
    show("graph of|ms", [("ms", ",.3f")], milliseconds(times))
    section.case("all but one stay", partial(leave, llm, sizes.batch - 1))
    timed = partial(mixed_wall_time, mixed, sizes.steps)
    show_step(section, "all but one decode, and a chunk", timed, mixed)
    section.case("one stays", partial(leave, llm, 1))
    show_step(section, "one decodes", partial(wall_time, step, sizes.steps), step)


def show_step(section: Section, name: str, timed: Callable[[], dict], step: Callable) -> None:
    """Two cases: the step by the host's clock, and its kernels."""
    wall = section.case(name, timed).get("ms_p50")
    found = section.case(f"{name}: kernels", partial(profiled, section, step))
    busy = found.get("busy_ms")
    row = {"wall": wall, "busy": busy}
    if wall is not None and busy is not None:
        row["idle"] = max(0, wall - busy)
    columns = [(column, ",.3f") for column in ("wall", "busy", "idle")]
    show("a step|wall ms|device works|is idle", columns, {name: row})
    kernels = {kernel["name"][:60]: kernel for kernel in found.get("kernels", [])}
    show("its kernels|us per step|calls", [("us", ",.1f"), ("calls", ",.1f")], kernels)


def decoding(section: Section) -> LLM:
    """An engine whose sequences have computed their prompts, and do not end while measured."""
    sizes = section.sizes
    llm, _ = new_llm(section)
    params = SamplingParams(temperature=0.6, max_tokens=12 * sizes.steps + 10, ignore_eos=True)
    longest = sizes.context * 3 // 2  # then the mean is the context
    begin_decodes(llm, random_prompts(llm, sizes.batch, longest), params)
    return llm


def contexts_of(llm: LLM) -> dict:
    contexts = [len(request.sequences[0]) for request in llm.requests.values()]
    return {"sequences": len(contexts), "contexts": contexts}


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

    logits, plain = sampled_rows(section)
    top_k = torch.full_like(plain.seed, 20)
    top_p = torch.full_like(plain.temperature, 0.95)
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


def sampled_rows(section: Section) -> tuple[torch.Tensor, Sampling]:
    """Logits of a batch, and how their tokens are drawn: without filters."""
    rows = section.sizes.batch
    logits = 4 * torch.randn(rows, section.sizes.vocab, device=section.device).to(section.dtype)
    numbers = torch.arange(rows, device=section.device)
    return logits, Sampling(torch.ones_like(numbers).float(), seed=numbers, position=numbers)


def seconds_behind_a_pause(section: Section, call: Callable) -> float:
    """Of the call's kernels: while the GPU pauses, Python launches all of them, as it does while
    the model runs."""
    if not section.cpu:
        torch.cuda._sleep(PAUSE)
    return seconds_of(call, section.device)


def phases_of(llm: LLM, step: Callable, count: int) -> dict:
    """Median milliseconds per step of each.

    `launch` has the phases from `prepare` to `sample` in it; `collect` waits for the tokens.
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
    with ExitStack() as patches:
        calls = {label: Watched(patches, *place) for label, place in watched.items()}
        for _ in range(count):
            step()
    return {label: 1000 * (percentile(call.seconds, 50) or 0) for label, call in calls.items()}


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

    def median(step: StepInputs) -> float:
        size = runner.graphs.size_for(step)
        runner.graphs.run(step, size)

        def in_a_row() -> None:
            for _ in range(count):
                runner.graphs.replays[size]()

        times = [seconds_of(in_a_row, section.device) for _ in range(section.sizes.steps)]
        return 1000 * (percentile(times, 50) or 0) / count

    @torch.inference_mode()
    def replay_and_launch(schedule: Schedule):
        for size in section.sizes.replays:
            if len(schedule.items) >= size:
                medians[size] = median(runner.prepare(Schedule(items=schedule.items[:size])))
        return real(schedule)

    with mock.patch.object(runner, "launch", replay_and_launch):
        llm.step(report=False)
    return medians


if __name__ == "__main__":
    run(decode_step)
