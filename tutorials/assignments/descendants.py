"""All that a process of ours has started, directly or not.

On Linux the process that grades is a *sub-reaper*: a process whose parent has ended becomes its
child. So all descendants are found, also those that have left their process group. Elsewhere the
group is ended, by `process.py`."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from tutorials.assignments.problems import Broken, Kind

PR_SET_CHILD_SUBREAPER = 36
SECONDS_TO_END = 10.0
ROUNDS = 1000  # of looking at the short list, until the whole system is looked at again


def children() -> set[int]:
    """Processes whose parent is this one."""
    if sys.platform != "linux":
        return set()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                # after the name, which may contain anything
                state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(state[1]) == os.getpid():
                    found.add(int(entry.name))
    return found


def children_at_a_glance() -> set[int]:
    """The same from a short list, which may lack some, or which the system does not have. It takes
    microseconds: a process that only forks and ends has no time to get away."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found


class Descendants:
    """At the exit, all processes that were started since the entrance are ended. Raises Broken if
    they start new ones faster than these can be ended."""

    def __enter__(self):
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.others = children()
        return self

    def __exit__(self, *_) -> None:
        until = time.monotonic() + SECONDS_TO_END
        while ours := children() - self.others:
            for _ in range(ROUNDS):
                if not ours:
                    break
                end_all(ours)
                ours = children_at_a_glance() - self.others
            if time.monotonic() > until:
                raise Broken(Kind.STILL_RUNNING)


def end_all(pids: set[int]) -> None:
    """Ends children of this process."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with suppress(ChildProcessError):  # somebody else has waited for it
            os.waitpid(pid, 0)
