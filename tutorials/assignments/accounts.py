"""The account that students' files run as: it must be for nothing else, and nothing of it is left
after a submission."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

try:
    import pwd
except ModuleNotFoundError:
    raise SystemExit("the grader needs Linux or macOS: on Windows, run it in WSL") from None

SHARED = ("/tmp", "/var/tmp", "/dev/shm")  # where everybody may write


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
        """Ends all processes of this user at once, and removes what they have left in the folders
        where everybody may write."""
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setgid(self.gid)
                os.setuid(self.uid)
                os.kill(-1, signal.SIGKILL)  # all that this user may end, but not the sender
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        for folder in {*SHARED, tempfile.gettempdir()}:
            with suppress(FileNotFoundError):
                for entry in os.scandir(folder):
                    self._remove(entry)

    def _remove(self, entry: os.DirEntry) -> None:
        with suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            if status.st_uid != self.uid:
                return
            if stat.S_ISDIR(status.st_mode):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
