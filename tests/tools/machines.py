"""Other machines, played on this one: `pytest --machine NAME`, in all workers and in each process that a test starts.

An instruction set is hidden by the variables that PyTorch, oneDNN and MKL read; what PyTorch says of bfloat16 is
replaced (machine/sitecustomize.py); cores are taken away, or kept busy by other processes.

`python -m tests.tools.machines` prints the names of the machines on which scripts/check runs the fast tests, too.
"""

import atexit
import os
import platform
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tutorials.measure.busy import endless_loop  # imports no PyTorch

FOLDER = Path(__file__).parent / "machine"
NO_BF16 = {"NANOVLLM_PLAYED_BF16": "0"}


class Machine(NamedTuple):
    meaning: str
    variables: dict[str, str]
    capability: str = ""  # what PyTorch then says of itself; empty: whatever it does
    is_busy: bool = False
    has_one_core: bool = False


MACHINES = {
    "plain": Machine(
        "AVX2, without AVX-512 and bfloat16",
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            **NO_BF16,
        },
        "AVX2",
    ),
    "baseline": Machine(
        "no vector instructions beyond SSE",
        {
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            **NO_BF16,
        },
        "DEFAULT",
    ),
    "bf16": Machine("PyTorch reports bfloat16 in hardware", {"NANOVLLM_PLAYED_BF16": "1"}),
    "busy": Machine("another process computes on each core", {}, is_busy=True),
    "one-core": Machine("a single core", {}, has_one_core=True),
    "elsewhere": Machine(
        "without what only Linux has (machine/elsewhere.py), text in ASCII by default",
        {
            "NANOVLLM_PLAYED_ELSEWHERE": "1",
            "LC_ALL": "C",
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONUTF8": "0",
        },
    ),
}


class CannotBePlayed(Exception):
    pass


def others() -> list[str]:
    """Three machines that this one is not itself: other instruction sets first."""
    import torch

    own = torch.backends.cpu.get_cpu_capability()
    has_bf16 = torch.cpu._is_avx512_bf16_supported()
    sets = [name for name in ("plain", "baseline") if is_x86() and MACHINES[name].capability != own]
    if not has_bf16:
        sets.append("bf16")
    return [*sets, "one-core", "busy"][:3]


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def play(name: str, is_worker: bool) -> None:
    """Call it before PyTorch is imported. A worker of pytest-xdist inherits everything, and only checks."""
    machine = MACHINES[name]
    if "torch" in sys.modules:
        raise CannotBePlayed("PyTorch has been imported before the machine was chosen")
    if machine.capability and not is_x86():
        raise CannotBePlayed(f"this processor is {platform.machine()}, not x86-64")
    if machine.has_one_core and not hasattr(os, "sched_setaffinity"):
        raise CannotBePlayed(f"{sys.platform} cannot take cores away from a process")
    if not is_worker:
        os.environ.update(machine.variables)
        paths = [str(FOLDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if machine.has_one_core:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        if machine.is_busy:
            keep_busy()
        sys.path.insert(0, str(FOLDER))
        sys.modules.pop("sitecustomize", None)  # that of this Python, if it has one
        import_module("sitecustomize")
    if name == "elsewhere" and sys.flags.utf8_mode:
        raise CannotBePlayed("Python has begun with UTF-8 as its encoding: set PYTHONUTF8=0")
    import torch

    found = torch.backends.cpu.get_cpu_capability()
    if machine.capability not in ("", found):
        raise CannotBePlayed(f"PyTorch still uses {found}")


def keep_busy() -> None:
    """On each core a process that computes until this one ends."""
    loops = ExitStack()
    atexit.register(loops.close)
    for _ in range(os.cpu_count() or 1):
        loops.enter_context(endless_loop())


def described(name: str) -> str:
    """What is played, and what is not."""
    import torch

    machine = MACHINES[name]
    parts = [machine.meaning, *(f"{key}={value}" for key, value in machine.variables.items())]
    if name == "elsewhere":
        parts.append("not played: what machine/elsewhere.py says")
    if name == "bf16" and not torch.cpu.get_capabilities().get("avx512_bf16"):
        parts.append("not played: its speed, this processor computes bfloat16 in software")
    return f"machine: {name}, played: " + "; ".join(parts)


if __name__ == "__main__":
    print(*others())
