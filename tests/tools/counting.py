"""What a function costs on any machine: the calls that it makes.

Tests import this file. An example that does: pytest tests/decoding/test_penalties.py -k counts
"""

import sys
from collections.abc import Callable


def counting(action: Callable[[], object]) -> int:
    """How many functions are called, in Python and in C."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count
