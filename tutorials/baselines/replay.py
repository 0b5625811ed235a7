"""Thousands of requests through the real scheduler and block manager, without a model: what does
the cache hold?

    python -m tutorials.baselines.replay --trace AzureLLMInferenceTrace_conv.csv --json tutorials/results/memory.json

prints the paper's figures 2 and 15 as tables (about five minutes). All requests wait from the start,
in the order of the trace, so that memory is what limits every system. The averages are over the steps
in which a request waits only because memory lacks."""

import math
import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from nanovllm.block_manager import BlockManager
from nanovllm.config import Limits
from nanovllm.processing.stats import cache_usage
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.topics.decoding.beam_search import BeamRequest, BeamSearch, BeamSearchParams
from tutorials.arguments import experiment
from tutorials.baselines.contiguous import OrcaMax, OrcaOracle, OrcaPow2
from tutorials.machine import environment
from tutorials.report import write_json
from tutorials.simulation.requests import lognormal_pairs, read_trace

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


class NoModel:
    """Draws tokens that say nothing, and other ones for every sequence, so that no two become equal
    by accident."""

    def __init__(self, seed: int = 0):
        self.rng = random.Random(seed)

    def run(self, schedule: Schedule) -> tuple[list[int], list[dict[int, float] | None]]:
        token_ids = [self.rng.getrandbits(30) for _ in schedule.sampled]
        return token_ids, [self.likeliest(seq.request) for seq in schedule.sampled]

    def likeliest(self, request: Request) -> dict[int, float] | None:
        """The likeliest of many tokens whose logits are normally distributed, for beams."""
        if not isinstance(request, BeamRequest):
            return None
        weights = sorted((math.exp(self.rng.gauss(0, 3)) for _ in range(200)), reverse=True)
        total = sum(weights)
        weights = weights[: request.num_logprobs]
        return {self.rng.getrandbits(30): math.log(w / total) for w in weights}


def new_request(i: int, prompt: int, output: int, n: int = 1, beam_width: int = 0) -> Request:
    params = SamplingParams(n=beam_width or n, max_tokens=output, ignore_eos=True)
    request = Request(str(i), None, [i] * prompt, params)
    if beam_width:
        search = BeamSearch(BeamSearchParams(beam_width=beam_width), frozenset(), output)
        request = BeamRequest(str(i), None, [i] * prompt, params, search=search)
    request.arrival = i
    return request


def replay(
    lengths: Lengths, manager_cls, block_size: int, setting: Setting, every: int = 20, **decoding
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
    scheduler, model = Scheduler(limits, manager), NoModel()
    scheduler.watermark = 0  # what paging wastes, not what admission leaves free
    for i, (prompt, output) in enumerate(lengths):
        scheduler.add(new_request(i, prompt, output, **decoding))
    samples, num_running, num_steps = [], 0, 0
    while scheduler.waiting:
        schedule = scheduler.schedule()
        lacks_memory = schedule.num_tokens < setting.max_num_batched_tokens
        if scheduler.waiting and lacks_memory and num_steps % every == 0:
            usage = cache_usage(scheduler)
            # free and not used by waiting requests: lost, whatever the reason
            usage["external_fragmentation"] += usage.pop("free")
            shared = usage["shared"]
            usage["saved"] = shared / (shared + manager.num_used_blocks * block_size)
            usage["being_written"] = schedule.num_tokens
            samples.append(usage)
            num_running += len(scheduler.running)
        scheduler.update(schedule, *model.run(schedule))
        num_steps += 1
    if not samples:
        raise ValueError(f"{len(lengths)} requests are too few: none of them ever waits for memory")
    num_slots = len(manager.blocks) * block_size
    mean = {name: sum(sample[name] for sample in samples) / len(samples) for name in samples[0]}
    saved = mean.pop("saved")
    return {
        **{name: slots / num_slots for name, slots in mean.items()},
        "saved": saved,
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


def waste(name: str, lengths: Lengths, setting: Setting, block_size: int = 16) -> dict:
    print(f"{name}: {len(lengths)} requests, {setting}")
    print(f"{'':14} {'tokens':>7} {'reserved':>9} {'internal':>9} {'external':>9} {'running':>8}")
    results = {}
    for system, manager_cls in SYSTEMS.items():
        result = results[system] = replay(lengths, manager_cls, block_size, setting)
        parts = [
            result[part]
            for part in (
                "token_states",
                "reserved",
                "internal_fragmentation",
                "external_fragmentation",
            )
        ]
        print(
            "{:14} {:7.1%} {:9.1%} {:9.1%} {:9.1%}".format(system, *parts),
            f"{result['running']:8.1f}",
            flush=True,
        )
    return {"setting": vars(setting), "requests": len(lengths), "systems": results}


def sharing(name: str, count: int) -> dict:
    lengths, results = lognormal_lengths(name, count), {"samples": {}, "beams": {}}
    for width in (2, 4, 6):
        for decoding, option in (("samples", "n"), ("beams", "beam_width")):
            result = results[decoding][width] = replay(
                lengths, BlockManager, 16, Setting(), **{option: width}
            )
            print(
                f"{name}: {width} {decoding} share {result['saved']:.1%} of their blocks",
                flush=True,
            )
    return results


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument(
        "--trace",
        type=Path,
        help="CSV with ContextTokens and GeneratedTokens, as the Azure traces have",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=4000,
        help="how many of the trace; half as many of the made-up lengths",
    )
    args = parser.parse_args()
    if args.requests < 400:
        parser.error(
            f"--requests {args.requests} is not allowed: fewer than 400 do not fill the cache"
        )
    workloads = {"ShareGPT": (lognormal_lengths("ShareGPT", args.requests // 2), Setting())}
    if args.trace:
        try:
            trace = read_trace(args.trace, args.requests, math.inf)
        except ValueError as error:
            parser.error(str(error))
        # Qwen3-8B in bfloat16 on 80 GB: 144 KiB per token, 16 GB of weights; contexts are longer than OPT allows
        setting = Setting(num_slots=363_000, max_model_len=16_384, max_num_batched_tokens=8192)
        workloads["Azure"] = [(prompt, output) for prompt, output, _ in trace], setting
    results = {
        "waste": {name: waste(name, *workload) for name, workload in workloads.items()},
        "sharing": {
            name: sharing(name, count) for name, count in {"Alpaca": 2000, "ShareGPT": 100}.items()
        },
    }
    write_json(environment() | {"device": "none: no model is run"} | results, args.json)


if __name__ == "__main__":
    main()
