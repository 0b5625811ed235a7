"""What figure 12 compares: systems, which differ from the engine in a class or two, and loads."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanovllm.config import Config
from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.simulator import Job, Run, simulate
from nanovllm.simulator.cost_model import FIELDS, HARDWARE, Hardware
from nanovllm.simulator.machines import Machine
from tutorials.baselines.contiguous import OrcaMax, OrcaOracle, OrcaPow2
from tutorials.baselines.replay import NUM_SLOTS
from tutorials.baselines.static_batching import StaticBatching
from tutorials.simulation.workloads import azure, poisson, sharegpt, workload

BLOCK_SIZE = 16
# two products of 5120 x 20480 in each layer are as much as three of 5120 x 13653; a token takes 800
# KB, as in the paper
OPT_13B = ("opt", 5120, 13653, 40, 40, 40, 128, True, 50272, 2048)
A100_40GB = Machine(
    Hardware("A100 40 GB", 1.555e12, 312e12, 40e9, "NVIDIA A100 Tensor Core GPU, data sheet")
)
A100_80GB = Machine(HARDWARE["a100"])


# --- systems ---


class WholePrompts(Scheduler):
    """No chunks: a prompt is computed in one step, beside requests that decode, as in Orca."""

    def may_admit(self, request: Request, schedule: Schedule) -> bool:
        return len(request.sequences[0]) <= schedule.tokens_left or not self.running


class PromptsFirst(WholePrompts):
    """Whole prompts in steps of their own, while all others wait, as in vLLM before its V1."""

    def make_room(self, schedule: Schedule) -> None:
        self.schedule_waiting(schedule)
        if schedule.items:
            schedule.tokens_left = 0


Options = dict[str, object]  # fields of Config


def systems(max_model_len: int, num_slots: int) -> dict[str, Options]:
    """How each system differs from the engine as it is. Orca's reserve up to `max_model_len`.

    Static batching is FasterTransformer as in the paper: its batch is as large as the memory
    allows, if each request may become as long as any.
    """
    contiguous = [
        type(cls.__name__, (cls,), {"max_model_len": max_model_len})
        for cls in (OrcaOracle, OrcaPow2, OrcaMax)
    ]
    return {
        "paged": {},
        **dict(
            zip(
                ("Orca (Oracle)", "Orca (Pow2)", "Orca (Max)"),
                ({"block_manager_cls": cls} for cls in contiguous),
            )
        ),
        "static batching": {
            "scheduler_cls": StaticBatching,
            "block_manager_cls": contiguous[-1],
            "max_num_seqs": num_slots // max_model_len,
        },
        "paged, prompts first": {
            "scheduler_cls": PromptsFirst,
            "max_num_batched_tokens": 2 * max_model_len,
        },
    }


# --- loads ---


@dataclass
class Load:
    """Requests at any rate, and what they are served by."""

    jobs: Callable[[float], list[Job]]  # at this number per second
    machine: Machine
    options: Options
    lowest: float  # a rate that every system sustains

    def run(self, system: Options, rate: float) -> Run:
        return run(self.jobs(rate), self.machine, self.options | system)


def run(jobs: list[Job], machine: Machine, options: Options) -> Run:
    return simulate(
        [job._replace(max_tokens=job.num_outputs) for job in jobs], Config(**options), machine
    )


def chats(model: Path, minutes: float) -> Load:
    (model / "config.json").write_text(
        json.dumps(dict(zip(FIELDS.split(), OPT_13B))), encoding="utf-8"
    )
    options = dict(
        model=str(model), num_blocks=NUM_SLOTS // BLOCK_SIZE, max_num_batched_tokens=2048
    )

    def jobs(rate: float) -> list[Job]:
        return workload(poisson(rate), sharegpt(), max(500, round(60 * minutes * rate)))

    return Load(jobs, A100_40GB, options | {"enable_prefix_caching": False}, lowest=0.25)


def recorded(trace: Path, minutes: float) -> Load:
    longest = len(azure(trace))
    options = dict(model="qwen3-8b", max_model_len=16384, max_num_batched_tokens=2048)

    def jobs(rate: float) -> list[Job]:
        return azure(trace, min(longest, max(500, round(60 * minutes * rate))), rate)

    return Load(jobs, A100_80GB, options | {"enable_prefix_caching": False}, lowest=1.0)
