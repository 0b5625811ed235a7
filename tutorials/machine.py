"""The machine: what it is called, what is installed on it, and its two ceilings, measured here and
now."""

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT_SECONDS = 0.5  # of one product at most, where a ceiling is measured
# which instructions PyTorch and oneDNN may use, and how many threads there are
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS")
VARIABLES += ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU")
# Neither torch nor anything of ours up here: the worker of any engine imports this file.


def installed(*packages: str) -> str | None:
    """The version of the first of these packages that this interpreter has."""
    for package in packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def interpreter_problem() -> str | None:
    """Why Triton's interpreter cannot run here, or None. None also where one of the two is missing:
    that is told by what imports it."""
    triton, numpy = installed("triton"), installed("numpy")
    if triton is None or numpy is None or numbers(triton) >= (3, 7) or numbers(numpy) < (2, 4):
        return None
    return f"the interpreter of Triton {triton} needs numpy < 2.4, and this is {numpy}"


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


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
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def device_name(device) -> str:
    """What the machine calls itself; of a CPU with the threads that PyTorch uses now."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    found = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    name = found[1] if found else platform.processor()
    count = torch.get_num_threads()
    return f"{name}, {count} thread{'s' * (count != 1)}"


def cpu_seconds(session: int) -> float | None:
    """Seconds that the processes of a session have computed so far. None if the system does not
    tell."""
    ticks = None
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = file.read_text(encoding="utf-8").rpartition(") ")[2].split()
            if int(fields[3]) == session:  # its own time, and that of its children that have ended
                ticks = (ticks or 0) + sum(map(int, fields[11:15]))
    return None if ticks is None else ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes(device) -> int:
    """Of the GPU, or of the whole machine; 0 if the system does not tell."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    with suppress(AttributeError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def this_machine(device, dtype, threads: int = 0):
    """Its Hardware: the best of ten large copies (read and written), and of ten large products.

    With `threads` on a CPU; 0 are as many as PyTorch uses now, which an engine may have changed.
    """
    import torch

    from nanovllm.topics.simulator.cost_model import Hardware

    threads_now = torch.get_num_threads()
    torch.set_num_threads(threads or threads_now)
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
    copy = torch.empty_like(source)
    copying = min(seconds_of(lambda: copy.copy_(source), device) for _ in range(10))
    flops_per_second = best_product(device, dtype)
    torch.set_num_threads(threads_now)
    return Hardware(device_name(device), 2 * size / copying, flops_per_second, memory_bytes(device))


def best_product(device, dtype) -> float:
    """FLOP/s of the best of ten matrix products.

    They are large, but not where one takes longer than PRODUCT_SECONDS: some CPUs multiply half
    precision a thousand times slower than float32.
    """
    n = 256
    most = 8192 if device.type == "cuda" else 1024
    while n < most and 8 * min(product_seconds(n, device, dtype, 2)) < PRODUCT_SECONDS:
        n *= 2
    return 2 * n**3 / min(product_seconds(n, device, dtype, 10))


def product_seconds(n: int, device, dtype, count: int) -> list[float]:
    """Of `count` products of two [n, n] matrices; the first one may start a library."""
    import torch

    a = torch.randn(n, n, device=device).to(dtype)
    out = torch.empty_like(a)
    return [seconds_of(lambda: torch.mm(a, a, out=out), device) for _ in range(count)]


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
