"""Walls around a student's process, as many as the system has. They are built here, before the
student's file is read; then this process becomes the player.

    python walls.py -|UID:GID COMMAND ...

Linux has *namespaces*: what a process sees of the system. Root can make new ones, on most systems
others can, too. In its own ones a process

- sees and ends only what it has started itself, and all of that ends with the first of them;
- leaves no shared memory, no semaphore and no message queue, because they end with the namespace;
- has no network.

Where there are none, `descendants.py` looks for what it has started, and `accounts.py` removes what
it has left.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
LARGEST_EXIT_STATUS = 128  # above, it is the number of a signal, as in a shell


def separate() -> None:
    """Makes new namespaces: that of processes is for those which this one starts. Raises OSError
    if the system does not have them, or does not allow it."""
    flags = CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    uid, gid = os.getuid(), os.getgid()
    if uid != 0:
        flags |= CLONE_NEWUSER  # in a new one of users, anybody may make the others
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with suppress(OSError):  # only newer systems let others than root do so
        # what is only in shared memory would be counted in no limit
        Path("/proc/sys/kernel/shmmni").write_text("0")


def can_separate() -> bool:
    """Tried by another process, since half of it cannot be undone."""
    if sys.platform != "linux":
        return False
    pid = os.fork()
    if pid == 0:
        status = 1
        with suppress(OSError):
            separate()
            status = 0
        os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def go_on_in_a_child() -> None:
    """Returns in a new process only. The old one waits for it, and ends as it does."""
    pid = os.fork()
    if pid == 0:
        end_with_parent()
        return
    # the question where it hangs is passed on
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(pid, signal.SIGUSR1))
    os.closerange(0, 3)  # if the child closes its pipes, they are closed
    ended, status = os.wait()
    while ended != pid:  # the first process of a namespace gets those that have lost their parent
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else LARGEST_EXIT_STATUS - code)


def end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def main() -> None:
    owner, *command = sys.argv[1:]
    end_with_parent()
    if can_separate():
        separate()
        go_on_in_a_child()  # the first in the namespace: all others end with it
        go_on_in_a_child()  # the player is the second: the first ignores most signals
    if owner != "-":
        become(*map(int, owner.split(":")))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
