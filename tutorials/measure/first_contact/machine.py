"""What the machine is, and its two ceilings; and the model that the other parts run."""

import os
import platform
import shutil
import subprocess
import sysconfig
from functools import partial
from pathlib import Path

import torch

from tutorials.machine import environment, installed, this_machine
from tutorials.measure.first_contact.section import Section, run


def machine(section: Section) -> None:
    """Versions, the GPU, a C compiler (Triton needs one), and the two ceilings."""
    cases = {
        "versions": versions,
        "device": partial(device_facts, section),
        "ceilings": lambda: this_machine(section.device, section.dtype)._asdict(),
        "under load": partial(under_load, section),
        "model": lambda: {"path": section.model},
    }
    for case, call in cases.items():
        for name, value in section.case(case, call).items():
            print(f"{name:17} {value}")


def versions() -> dict:
    facts = {key: environment()[key] for key in ("commit", "python")}
    for package in ("torch", "triton", "transformers", "pytest-xdist"):
        facts[package] = installed(package)
    compilers = map(shutil.which, [os.environ.get("CC", "cc"), "gcc", "clang"])
    facts["c_compiler"] = next(filter(None, compilers), None)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    facts["python_header"] = str(header) if header.exists() else None
    facts["libcuda"] = libcuda()
    return facts | {"processors": os.cpu_count(), "system": platform.platform()}


def device_facts(section: Section) -> dict:
    if section.cpu:
        return {"name": "cpu"}
    facts = torch.cuda.get_device_properties(section.device)
    free, total = torch.cuda.mem_get_info()
    return {
        "name": facts.name,
        "capability": [facts.major, facts.minor],
        "multiprocessors": facts.multi_processor_count,
        "l2_bytes": facts.L2_cache_size,
        "total_bytes": total,
        "free_bytes": free,
        "cuda": torch.version.cuda,
    } | nvidia_smi("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")


def libcuda() -> list[str]:
    """Where the linker finds the driver's library, which Triton needs."""
    command = shutil.which("ldconfig", path=os.environ.get("PATH", "") + ":/sbin:/usr/sbin")
    if command is None:
        return []
    lines = subprocess.run([command, "-p"], capture_output=True, text=True).stdout.splitlines()
    return [line.strip() for line in lines if "libcuda.so" in line]


def nvidia_smi(*fields: str) -> dict:
    """What the driver says, for each GPU; nothing where there is no such program."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    query = [command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        return {"nvidia_smi": done.stdout.strip() or done.stderr.strip()}
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    return {field: "; ".join(values) for field, values in zip(fields, zip(*rows))}


def under_load(section: Section) -> dict:
    """Clocks and power while the GPU multiplies, which it does for about a second."""
    if not section.cpu:
        a = torch.ones(8192, 8192, dtype=section.dtype, device=section.device)
        for _ in range(500):
            a @ a
    return nvidia_smi("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


if __name__ == "__main__":
    run(machine)
