"""The account that students' files run as: it must be for nothing else, and nothing of it is left
after a submission."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tutorials.assignments.kernel_objects import forget_keys, remove_ipc
from tutorials.assignments.leftovers import remove
from tutorials.assignments.walls import become

try:
    import pwd
except ModuleNotFoundError:
    raise SystemExit("the grader needs Linux or macOS: on Windows, run it in WSL") from None

# where everybody may write; in /dev/mqueue are message queues
SHARED = (
    "/tmp",
    "/var/tmp",
    "/var/crash",
    "/var/lock",
    "/run/lock",
    "/dev/shm",
    "/dev/mqueue",
)


@dataclass
class Account:
    name: str
    uid: int
    gid: int

    @staticmethod
    def named(name: str) -> "Account":
        """Raises ValueError if no student's file can be run as this user."""
        if sys.platform != "linux":
            raise ValueError("it needs Linux, which says whose a process is")
        if os.getuid() != 0:
            raise ValueError("only root can run a process as another user")
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise ValueError("there is no such user") from None
        if entry.pw_uid == 0:
            raise ValueError("it is root, who can read and change everything")
        account = Account(name, entry.pw_uid, entry.pw_gid)
        account.check(Path(entry.pw_dir))
        return account

    def check(self, home: Path) -> None:
        if home.is_dir() and home.stat().st_uid == self.uid:
            raise ValueError(f"files could stay in its home, {home}: useradd --no-create-home")
        if found := self.processes():
            why = "choose an account that is for grading only, or end what an earlier grading left"
            raise ValueError(f"this user has other processes, such as {min(found)}: {why}")
        python = [sys.executable, "-I", "-c", "pass"]
        try:
            subprocess.run(python, user=self.uid, group=self.gid, cwd="/", check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(f"this user cannot run {sys.executable}: {error}") from None

    def processes(self) -> set[int]:
        """Where the system says whose a process is."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/status"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                lines = path.read_text(errors="replace").splitlines()
                (uids,) = [line.split()[1:] for line in lines if line.startswith("Uid:")]
                is_zombie = any(line.startswith("State:\tZ") for line in lines)
                if str(self.uid) in uids and not is_zombie:
                    found.add(int(path.parent.name))
        return found

    def clean(self) -> None:
        """Ends all processes of this user, and removes what they have left: files, shared memory,
        messages, keys."""
        self._end_processes()
        remove_ipc(self.uid)
        for path in self._files():
            remove(path)

    def _end_processes(self) -> None:
        """All at once, so that none can start another meanwhile."""
        pid = os.fork()
        if pid == 0:
            try:
                become(self.uid, self.gid)
                with suppress(ProcessLookupError):  # there are none
                    os.kill(-1, signal.SIGKILL)  # all that this user may end, but not the sender
                forget_keys()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

    def _files(self) -> list[str]:
        """Files and folders of this user in the folders where everybody may write, and in those
        inside them."""
        found = []
        folders = [*SHARED, tempfile.gettempdir()]
        for folder in folders:  # it grows
            for path in paths_in(folder):
                with suppress(FileNotFoundError):  # somebody else has removed it
                    status = os.lstat(path)
                    if status.st_uid == self.uid:
                        found.append(path)
                    elif stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IWOTH:
                        folders.append(path)
        return found


def paths_in(folder: str) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:  # the system has no such folder
        return []
