"""Thousands of requests through the real scheduler and block manager, without a model: what does
the cache hold?

All requests wait from the start, in the order of `lengths`, so that memory is what limits every
system. The averages are over the steps in which a request waits only because memory lacks."""

import random
from dataclasses import dataclass
from itertools import islice

from nanovllm.block_manager import BlockManager
from nanovllm.config import Limits
from nanovllm.processing.stats import cache_usage
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from tutorials.baselines.contiguous import OrcaMax, OrcaOracle, OrcaPow2
from tutorials.simulation.requests import lognormal_pairs

Lengths = list[tuple[int, int]]  # of prompts and outputs
MEANS = {"ShareGPT": (161.31, 337.99), "Alpaca": (19.31, 58.45)}  # the paper's figure 11
MAX_MODEL_LEN = 2048  # of OPT-13B ...
NUM_SLOTS = 15_700  # ... whose KV cache has so many slots on the paper's A100 (table 1)


@dataclass
class Setting:
    """What the requests run on."""

    num_slots: int = NUM_SLOTS
    max_model_len: int = MAX_MODEL_LEN
    max_num_batched_tokens: int = 2048


def lognormal_lengths(name: str, count: int, seed: int = 0) -> Lengths:
    """Lengths with the means that the paper gives for a data set. Their shape is our assumption,
    not the paper's."""
    pairs = lognormal_pairs(random.Random(seed), MEANS[name], 1.0, MAX_MODEL_LEN)
    return list(islice(pairs, count))


def new_request(i: int, prompt: int, output: int) -> Request:
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    request = Request(str(i), None, [i] * prompt, params)
    request.arrival = i
    return request


def replay(
    lengths: Lengths, manager_cls, block_size: int, setting: Setting, every: int = 20
) -> dict:
    """Mean part of the cache for each use, over the steps in which requests wait; and how many ran
    at a time. What the step itself writes, `being_written`, is also counted as reserved.

    Raises ValueError if there are no such steps.
    """
    limits = Limits(
        max_model_len=setting.max_model_len,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_num_seqs=1024,
    )
    manager = manager_cls(setting.num_slots // block_size, block_size, enable_prefix_caching=False)
    manager.max_model_len = setting.max_model_len
    scheduler, rng = Scheduler(limits, manager), random.Random(0)
    scheduler.watermark = 0  # what paging wastes, not what admission leaves free
    for i, (prompt, output) in enumerate(lengths):
        scheduler.add(new_request(i, prompt, output))
    samples, num_running, num_steps = [], 0, 0
    while scheduler.waiting:
        schedule = scheduler.schedule()
        lacks_memory = schedule.num_tokens < setting.max_num_batched_tokens
        if scheduler.waiting and lacks_memory and num_steps % every == 0:
            usage = cache_usage(scheduler)
            # free and not used by waiting requests: lost, whatever the reason
            usage["external_fragmentation"] += usage.pop("free")
            usage["being_written"] = schedule.num_tokens
            samples.append(usage)
            num_running += len(scheduler.running)
        # no two sequences become equal by accident
        scheduler.update(schedule, [rng.getrandbits(30) for _ in schedule.sampled])
        num_steps += 1
    if not samples:
        raise ValueError(f"{len(lengths)} requests are too few: none of them ever waits for memory")
    num_slots = len(manager.blocks) * block_size
    mean = {name: sum(sample[name] for sample in samples) / len(samples) for name in samples[0]}
    return {
        **{name: slots / num_slots for name, slots in mean.items()},
        "running": num_running / len(samples),
        "preemptions": scheduler.num_preemptions,
        "steps": num_steps,
    }


SYSTEMS = {
    "Orca (Max)": OrcaMax,
    "Orca (Pow2)": OrcaPow2,
    "Orca (Oracle)": OrcaOracle,
    "paged": BlockManager,
}
