"""Settings for all tests; pytest reads this file first.

Run all tests: pytest, or faster: pytest -n auto
"""

import os
from pathlib import Path

# Two threads are hardly faster for models this small, and on a machine that does something else ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # before Triton is imported: its kernels run on the CPU
