"""Section 1: what the machine is, and its two ceilings."""

import os
import platform
import shutil
from functools import partial

import torch

from tutorials.performance.first_contact.section import Section, run
from tutorials.performance.machine import environment, installed, this_machine


def machine(section: Section) -> None:
    """Versions, the GPU, a C compiler (Triton needs one), and the two ceilings."""
    section.case("versions", versions)
    section.case("device", partial(device_facts, section))
    section.case("ceilings", lambda: this_machine(section.device, section.dtype)._asdict())
    for case in section.cases.values():
        for name, value in case.items():
            print(f"{name:17} {value}")
    print()


def versions() -> dict:
    facts = {key: environment()[key] for key in ("commit", "python")}
    for package in ("torch", "triton", "transformers", "pytest-xdist"):
        facts[package] = installed(package)
    compilers = map(shutil.which, [os.environ.get("CC", "cc"), "gcc", "clang"])
    facts["c_compiler"] = next(filter(None, compilers), None)
    return facts | {"processors": os.cpu_count(), "system": platform.platform()}


def device_facts(section: Section) -> dict:
    if section.cpu:
        return {"name": "cpu"}
    facts = torch.cuda.get_device_properties(section.device)
    free, total = torch.cuda.mem_get_info()
    driver = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 10)["tail"]
    return {
        "name": facts.name,
        "capability": [facts.major, facts.minor],
        "multiprocessors": facts.multi_processor_count,
        "l2_bytes": facts.L2_cache_size,
        "total_bytes": total,
        "free_bytes": free,
        "cuda": torch.version.cuda,
        "driver": " ".join(driver),
    }
