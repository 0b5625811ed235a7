"""Other machines, simulated on this one: `pytest --machine NAME`, in all workers and in each process that a test starts.

Variables that PyTorch, oneDNN and MKL read hide an instruction set. What PyTorch says of bfloat16 is replaced
(machine/sitecustomize.py).

`python -m tests.tools.machines` prints the names of the machines that differ from this one: scripts/check runs the fast
tests on them.
"""

import os
import platform
import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent / "machine"
MACHINES = {
    "plain": {  # AVX2, without AVX-512 and bfloat16
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NANOVLLM_SIMULATED_BF16": "0",
    },
    "bf16": {"NANOVLLM_SIMULATED_BF16": "1"},  # PyTorch reports bfloat16 in hardware
}


def others() -> list[str]:
    """The machines that this one is not itself."""
    import torch

    found = []
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if is_x86 and torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        found.append("plain")
    if not torch.cpu._is_avx512_bf16_supported():
        found.append("bf16")
    return found


def simulate(name: str) -> None:
    """Call it before PyTorch is imported. The processes that this one starts inherit the machine."""
    if "torch" in sys.modules:
        raise ValueError(f"--machine {name}: PyTorch was imported before the machine was chosen")
    os.environ.update(MACHINES[name])
    paths = [str(FOLDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.insert(0, str(FOLDER))
    sys.modules.pop("sitecustomize", None)  # that of this Python, if it has one
    import_module("sitecustomize")


if __name__ == "__main__":
    print(*others())
