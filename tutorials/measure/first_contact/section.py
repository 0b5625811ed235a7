"""What the parts share: how much each does, its cases, and the file of its results."""

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.device.choose import choose_dtype
from nanovllm.simulator.cost_model import FIELDS
from tutorials.measure.checkpoints import random_model, write_checkpoint
from tutorials.report import table, write_json

MODEL = "qwen3-0.6b"  # its shapes, with random weights
TINY = dict(zip(FIELDS.split(), ("qwen3", 64, 128, 1, 4, 2, 32, True, 300, 512)))  # with --cpu


@dataclass(frozen=True)
class Sizes:
    """How much the parts do: as it stands here on a GPU."""

    # engine, decode_step and options
    prompts: int = 32
    tokens: int = 48
    batch: int = 256  # whose memory and time are measured
    context: int = 850
    steps: int = 30
    replays: tuple[int, ...] = (1, 16, 64, 128, 256)  # batches
    in_a_row: int = 10  # replays that are timed together
    chunk: int = 512  # tokens of a prompt that is computed beside decodes
    vocab: int = 151_936
    options: dict[str, Any] = field(default_factory=lambda: {"max_model_len": 4096})  # of LLM
    # sweep
    swept: tuple[int, ...] = (16, 48, 128, 256)  # sequences, with all tiles
    few: tuple[int, ...] = (1, 4, 16)  # sequences, with all parts
    contexts: tuple[int, ...] = (850, 4096)  # their means
    splits: tuple[int, ...] = (1, 2, 4, 8)
    parts: tuple[int, ...] = (64, 128, 256)  # tokens of a context that are worth a program
    tiles: int = 8
    prefill: tuple[int, int] = (8, 1024)  # prompts, tokens


OPTIONS_ON_CPU = {
    "kv_cache_gib": 0.01,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,  # few steps: a kernel takes long to begin
}
ON_CPU = Sizes(
    prompts=2,
    tokens=2,
    batch=2,
    context=20,
    steps=2,
    replays=(1, 2),
    in_a_row=2,
    chunk=8,
    vocab=1000,
    options=OPTIONS_ON_CPU,
    swept=(1,),
    few=(1,),
    contexts=(16,),
    splits=(2,),
    parts=(8,),
    tiles=1,
    prefill=(1, 8),
)


class Section:
    """What the cases of a part give. A case that fails spares the others."""

    def __init__(self, file: Path, cpu: bool, folder: Path):
        self.file = file
        self.cpu = cpu
        self.folder = folder  # for what is needed only here
        self.sizes = ON_CPU if cpu else Sizes()
        self.device = torch.device("cpu" if cpu else "cuda")
        self.dtype = dtype_of_engine(self.device)
        self.results: dict[str, Any] = {"doing": "its start", "cases": {}}

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def case(self, name: str, call: Callable[[], dict]) -> dict:
        """Writes and returns what the call returns. An "error" in it, or an exception, is the
        section's, too."""
        self.results["doing"] = name
        self.write()
        try:
            gc.collect()
            if not self.cpu:
                torch.cuda.empty_cache()
            result = call()
            json.dumps(result)  # or all that follows could not be written, either
            self.synchronize()
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        if "error" in result:
            self.results.setdefault("error", f"{name}: {result['error']}")
        self.results["cases"][name] = result
        self.results["doing"] = f"what follows {name}"
        self.write()
        return result

    def synchronize(self) -> None:
        """Waits for the GPU; what has gone wrong there since is raised here."""
        if not self.cpu:
            torch.cuda.synchronize()

    def write(self) -> None:
        write_json(self.results, self.file)

    @cached_property
    def model(self) -> str:
        """The directory of the model with random weights."""
        if not self.cpu:
            return str(random_model(MODEL, Path("~/.cache/nanovllm")))
        write_checkpoint(TINY, self.folder / "tiny")
        return str(self.folder / "tiny")


def dtype_of_engine(device: torch.device) -> torch.dtype:
    """In which the engine runs its kernels on this device; every CPU can multiply that of CPUs."""
    config = Config(model=MODEL, attention_backend="triton")
    return choose_dtype(config, SimpleNamespace(dtype=torch.bfloat16), device)


def show(header: str, columns: list[tuple], records: dict[str, Any]) -> None:
    """Prints a table of the records that have a number for it; records of a failed case have none."""
    records = {name: record for name, record in records.items() if isinstance(record, dict)}
    print(table(header, columns, records), end="\n\n", flush=True)


def milliseconds(case: dict) -> dict[str, dict]:
    """The numbers of a case as records of a table; none where it has failed."""
    return {str(key): {"ms": ms} for key, ms in case.items() if isinstance(ms, float)}


def run(function: Callable[[Section], None]) -> None:
    """The command line of a part. The exit status says whether there was an error."""
    parser = argparse.ArgumentParser(description=function.__doc__)
    parser.add_argument("file", type=Path, help="where the results are written")
    parser.add_argument("--cpu", action="store_true", help="without a GPU: tiny, interpreted")
    args = parser.parse_args()
    print(f"{function.__doc__}\n", flush=True)
    start = time.perf_counter()
    gc.freeze()  # recording a graph collects garbage, and need not look at what was imported
    with tempfile.TemporaryDirectory() as folder:
        section = Section(args.file, args.cpu, Path(folder))
        function(section)
    gc.unfreeze()  # or Triton's bindings complain at the end
    del section.results["doing"]  # where the clock ends a part, its file says what it was doing
    section.results["seconds"] = time.perf_counter() - start
    section.write()
    error = section.results.get("error")
    sys.exit(error and f"--- ERROR: {error}")
