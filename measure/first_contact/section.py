"""What the sections share: how much each does, its cases, and the file of its results."""

import gc
import json
import os
import shlex
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from measure.first_contact.job import AT_FIRST, Job
from nanovllm.config import Config
from nanovllm.device.choose import choose_dtype
from nanovllm.simulator.cost_model import FIELDS, SHAPES
from tutorials.machine import ROOT
from tutorials.performance.checkpoints import random_model, write_checkpoint
from tutorials.report import table, write_json

PATIENCE = 10  # seconds in which a program may end itself after its deadline
MODEL = "qwen3-0.6b"  # its shapes, with random weights
TINY = dict(zip(FIELDS.split(), ("qwen3", 64, 128, 1, 4, 2, 32, True, 300, 512)))  # with --cpu


@dataclass(frozen=True)
class Sizes:
    """How much the sections do."""

    # kernels
    decodes: dict[int, int]  # sequences -> longest context
    splits: tuple[int, ...]  # 0 is the kernel's own choice
    prompts: tuple[tuple[int, int], ...]  # (queries, context)
    rows: int
    vocab: int
    swaps: int
    swapped_layers: int
    # engine and decode_step
    greedy: tuple[int, int]  # prompts, tokens
    batch: int  # whose memory and time are measured
    context: int
    steps: int
    replays: tuple[int, ...]  # batches
    in_a_row: int  # replays that are timed together
    chunk: int  # tokens of a prompt that is computed beside decodes
    larger: dict[str, Any]  # shape of a larger model, of which one step is measured
    options: dict[str, Any]  # of LLM
    # sweep
    swept: tuple[int, ...]  # sequences, with all tiles
    few: tuple[int, ...]  # sequences, with all parts
    contexts: tuple[int, ...]  # their means
    swept_splits: tuple[int, ...]
    parts: tuple[int, ...]  # tokens of a context that are worth a program
    tiles: int
    prefill: tuple[int, int]  # prompts, tokens


ON_GPU = Sizes(
    decodes={1: 4000, 8: 4000, 33: 2500, 48: 2500, 256: 600},
    splits=(0, 1, 2, 4, 8, 16, 32),
    prompts=((1000, 1000), (17, 17), (513, 513), (2, 700), (64, 1500), (300, 301)),
    rows=256,
    vocab=151_936,
    swaps=50,
    swapped_layers=28,
    greedy=(32, 48),
    batch=256,
    context=850,
    steps=30,
    replays=(1, 16, 64, 128, 256),
    in_a_row=10,
    chunk=512,
    larger=SHAPES["qwen3-8b"],
    options={},
    swept=(16, 48, 128, 256),
    few=(1, 4, 16),
    contexts=(850, 4096),
    swept_splits=(1, 2, 4, 8),
    parts=(64, 128, 256),
    tiles=8,
    prefill=(8, 1024),
)
ON_CPU = Sizes(
    decodes={2: 60},
    splits=(0, 2),
    prompts=((20, 20), (2, 30)),
    rows=4,
    vocab=1000,
    swaps=2,
    swapped_layers=1,
    greedy=(2, 2),
    batch=2,
    context=20,
    steps=2,
    replays=(1, 2),
    in_a_row=2,
    chunk=8,
    larger=TINY,
    options={
        "kv_cache_gib": 0.01,
        "max_num_seqs": 4,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,  # few steps: a kernel takes long to begin
    },
    swept=(1,),
    few=(1,),
    contexts=(16,),
    swept_splits=(2,),
    parts=(8,),
    tiles=1,
    prefill=(1, 8),
)


class DeviceLostError(Exception):
    """Nothing more can run in this process."""


class Section:
    """What a section's cases give. After its deadline it skips them; a failed one spares others."""

    def __init__(self, job: Job, folder: Path):
        self.job = job
        self.cpu = job.cpu
        self.folder = folder  # for what is needed only here
        self.sizes = ON_CPU if job.cpu else ON_GPU
        self.device = torch.device("cpu" if job.cpu else "cuda")
        self.dtype = dtype_of_engine(self.device)
        self.results: dict[str, Any] = {"doing": AT_FIRST, "cases": {}, "skipped": []}

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def cases(self) -> dict[str, dict]:
        return self.results["cases"]

    def seconds_left(self) -> float:
        return self.job.deadline - time.time()

    def case(self, name: str, call: Callable[[], dict]) -> None:
        """Writes what the call returns; an "error" in it, or an exception, is the section's too."""
        if self.seconds_left() < 0:
            self.results["skipped"].append(name)
            self.write()
            return
        self.results["doing"] = name
        self.write()
        try:
            self.release()
            result = call()
            json.dumps(result)  # or all that follows could not be written, either
            self.synchronize()
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        self.cases[name] = result
        if "error" in result:
            self.results.setdefault("error", f"{name}: {result['error']}")
        self.results["doing"] = f"what follows {name}"
        self.write()
        if "error" in result:
            self.check_device(name)

    def release(self) -> None:
        """Gives the memory back that cases before have left, an engine for example."""
        gc.collect()
        if not self.cpu:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Waits for the GPU; what has gone wrong there since is raised here."""
        if not self.cpu:
            torch.cuda.synchronize()

    def check_device(self, name: str) -> None:
        """After an illegal access everything fails in this process, with the same words."""
        reason = self.why_lost()
        if reason is not None:
            lost = f"the device has been lost in {name!r} ({reason}): nothing was tried after it"
            raise DeviceLostError(lost)

    def why_lost(self) -> str | None:
        """What the device says to everything from now on, if it has been lost."""
        try:
            self.synchronize()
        except Exception as error:
            return str(error).partition("\n")[0]
        return None

    def write(self) -> None:
        write_json(self.results, self.job.path)

    def show(self, header: str, columns: list[tuple], records: dict | None = None) -> None:
        """Prints a table. One that cannot be printed spares the cases that follow: all numbers are
        in the file."""
        try:
            print(table(header, columns, self.cases if records is None else records))
        except Exception:
            traceback.print_exc()
        print("\n", flush=True)

    def model(self) -> str:
        """The directory of the model with random weights."""
        if not self.cpu:
            return str(random_model(MODEL, Path("~/.cache/nanovllm")))
        if not (self.folder / "tiny").exists():
            write_checkpoint(TINY, self.folder / "tiny")
        return str(self.folder / "tiny")


def dtype_of_engine(device: torch.device) -> torch.dtype:
    """In which the engine runs its kernels on this device; every CPU can multiply that of CPUs."""
    config = Config(model=MODEL, attention_backend="triton")
    return choose_dtype(config, SimpleNamespace(dtype=torch.bfloat16), device)


def run(command: list[str], seconds: float) -> dict:
    """Status, seconds and lines of a program; when its time is over, all it started ends."""
    start = time.perf_counter()
    by_clock = False
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(1, seconds))
        except subprocess.TimeoutExpired:
            by_clock = True
            output = interrupted(process)
    end_session(process.pid)
    lines = output.splitlines()
    failures = [line for line in lines if "FAILED" in line or "ERROR" in line]
    result = {
        "status": process.returncode,
        "seconds": time.perf_counter() - start,
        "failures": failures,
        "tail": lines[-60:],
    }
    if by_clock:
        what = shlex.join(command)
        result["error"] = f"ended by the clock after {result['seconds']:.0f} seconds: {what}"
    elif process.returncode != 0:
        result["error"] = f"exit status {process.returncode}"
    return result


def interrupted(process: subprocess.Popen, patience: float = PATIENCE) -> str:
    """What the program has printed, also after Ctrl-C: pytest still says what has failed so far."""
    process.send_signal(signal.SIGINT)
    try:
        output, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        end_session(process.pid)
        output, _ = process.communicate()
    return output


def end_session(leader: int) -> None:
    """Ends what a program has started, and the program."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
