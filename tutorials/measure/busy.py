"""An endless loop beside what is measured, for a busy machine. Imports no PyTorch."""

import os
import subprocess
import sys
from contextlib import contextmanager

# It ends with the process that has started it, however and whenever that ends.
LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(10**6):
        pass
"""


@contextmanager
def endless_loop():
    process = subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid())])
    try:
        yield
    finally:
        process.kill()
        process.wait()
