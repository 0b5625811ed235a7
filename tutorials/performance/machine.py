"""The machine: what it is called, what is installed on it, and its two ceilings, measured here and
now."""

import os
import platform
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Neither torch nor anything of ours up here: the worker of any engine imports this file.


def installed(*packages: str) -> str | None:
    """The version of the first of these packages that this interpreter has."""
    for package in packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def git(*arguments: str) -> str:
    """What git prints, or nothing where there is no git."""
    with suppress(OSError):
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
    return ""


def environment() -> dict:
    """What a result should say of where it came from."""
    commit, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "*.py")
    return {
        "command": "python " + shlex.join(sys.orig_argv[1:]),
        "commit": commit + "-dirty" * bool(changed) or None,
        "python": platform.python_version(),
    }


def device_name(device, threads: int = 0) -> str:
    """What the machine calls itself; of a CPU with its threads, 0 are as many as PyTorch uses
    now."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    name = names[0].partition(": ")[2] if names else platform.processor()
    return f"{name}, {threads or torch.get_num_threads()} threads"


def memory_bytes(device) -> int:
    """Of the GPU, or of the whole machine; 0 if the system does not tell."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    with suppress(AttributeError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def this_machine(device, dtype, threads: int = 0):
    """Its Hardware: the best of ten large copies (read and written), and the best of ten large
    matrix products.

    With `threads` on a CPU; 0 are as many as PyTorch uses at this moment, which an engine may have
    changed.
    """
    import torch

    from nanovllm.roofline import Hardware

    threads_now = torch.get_num_threads()
    torch.set_num_threads(threads or threads_now)
    size, n = (2**30, 8192) if device.type == "cuda" else (2**27, 1024)
    source = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
    a = torch.randn(n, n, device=device).to(dtype)
    copy, out = torch.empty_like(source), torch.empty_like(a)
    copying = min(seconds_of(lambda: copy.copy_(source), device) for _ in range(10))
    multiplying = min(seconds_of(lambda: torch.mm(a, a, out=out), device) for _ in range(10))
    hardware = Hardware(
        device_name(device), 2 * size / copying, 2 * n**3 / multiplying, memory_bytes(device)
    )
    torch.set_num_threads(threads_now)
    return hardware


def seconds_of(call, device) -> float:
    """Of one call; on CUDA by the GPU's own clock."""
    import torch

    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000
