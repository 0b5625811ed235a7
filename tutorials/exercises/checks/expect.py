"""What the checks of all chapters share."""

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

SCANS = ("split", "splitlines", "partition", "rpartition", "decode", "replace")


class Wrong(Exception):
    """An answer is wrong. The error message has the number that was seen."""


def expect(holds: object, sentence: str) -> None:
    if not holds:
        raise Wrong(sentence)


def unchanged(call: Callable, *given: object) -> Any:
    """What an answer returns. It gets copies, and must leave these lists and tensors as they are."""
    copies = copy.deepcopy(given)
    before = pickle.dumps(copies)
    result = call(*copies)
    expect(pickle.dumps(copies) == before, f"{call.__name__} has changed what it was given")
    return result


def num_operations(call: Callable[[], object]) -> int:
    """How many operations of Python a call takes. A method that reads a whole text or all bytes
    takes one for each of them."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    def profile(frame, event, function):
        nonlocal count
        is_scan = event == "c_call" and function.__name__ in SCANS
        if is_scan and isinstance(function.__self__, str | bytes | bytearray):
            count += len(function.__self__)

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
    return count


def expect_linear(name: str, call_of: Callable[[int], Callable[[], object]], size: int) -> None:
    """Calls an answer for some things and for four times as many. Twice as many operations for
    each thing are still allowed."""
    few, many = (num_operations(call_of(count)) for count in (size, 4 * size))
    text = f"{name}: {few:,} operations for {size}, and {many:,} for four times as many"
    expect(many < 8 * few, text)


def counted(kind: type) -> Any:
    """A subclass of int or str. `num_alive` says how many of its objects are still in use."""

    class Counted(kind):
        num_alive = 0

        def __new__(cls, value):
            cls.num_alive += 1
            return super().__new__(cls, value)

        def __del__(self):
            type(self).num_alive -= 1

    return Counted
