"""What outlives a process and is no file: shared memory, message queues, semaphores and keys.

In an IPC namespace of its own (`walls.py`) a process leaves none of the first three. Elsewhere they
are removed here: Linux lists them in /proc/sysvipc, each with its owner."""

import ctypes
import platform
from pathlib import Path

LISTS = Path("/proc/sysvipc")
NUMBERS = {"shm": "shmid", "msg": "msqid", "sem": "semid"}  # kind -> its column in the list
IPC_RMID = 0
KEYCTL = {"x86_64": 250, "aarch64": 219}  # the number of the system call
KEYCTL_CLEAR = 7
KEYCTL_GET_PERSISTENT = 22
THREAD_KEYRING = -1
USER_KEYRING = -4
USER_SESSION_KEYRING = -5


def owned_by(uid: int, kind: str) -> list[int]:
    """The numbers of the "shm", "msg" or "sem" that this user has made."""
    try:
        heading, *lines = (LISTS / kind).read_text().splitlines()
    except OSError:  # the system has none, or no list of them
        return []
    columns = heading.split()
    rows = [dict(zip(columns, map(int, line.split()))) for line in lines]
    return [row[NUMBERS[kind]] for row in rows if uid in (row["uid"], row["cuid"])]


def remove_ipc(uid: int) -> None:
    """Removes all SysV shared memory, message queues and semaphores of this user."""
    libc = ctypes.CDLL(None)
    for number in owned_by(uid, "shm"):
        libc.shmctl(number, IPC_RMID, None)
    for number in owned_by(uid, "msg"):
        libc.msgctl(number, IPC_RMID, None)
    for number in owned_by(uid, "sem"):
        libc.semctl(number, 0, IPC_RMID)


def forget_keys() -> None:
    """Empties the keyrings that the kernel keeps for the user of this process."""
    number = KEYCTL.get(platform.machine())
    if number is None:
        return
    libc = ctypes.CDLL(None)
    persistent = libc.syscall(number, KEYCTL_GET_PERSISTENT, -1, THREAD_KEYRING)
    for keyring in (USER_KEYRING, USER_SESSION_KEYRING, persistent):
        libc.syscall(number, KEYCTL_CLEAR, keyring)
