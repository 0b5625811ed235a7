"""The box in which a student's process runs. Bubblewrap makes it, a tool of Linux: apt install bubblewrap.

In the box are Python and the system's programs, which cannot be written to, a copy of the library,
and an empty /tmp of 64 MiB. There is no other file, no other process and no network. The box ends
with its first process, or with the process that grades, and all that is in it ends, too.
"""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
TMP_BYTES = 64 * 2**20
# root needs no new users to make the others, and its processes become another user (player.py)
NAMESPACES_FOR_ROOT = "--unshare-pid --unshare-ipc --unshare-net --unshare-uts --unshare-cgroup-try"
RIGHTS_OF_ROOT = "--cap-add CAP_SETUID --cap-add CAP_SETGID"
WITHOUT = "a file is graded with limits of memory and time only: grade only files that you trust"


class Place(NamedTuple):
    """Where a student's process runs. The paths are those that it sees."""

    command: list[str]  # before that of the process
    library: str
    home: str


def place_in(folder: Path) -> Place:
    """In a box, with the library of this folder; where there is none, in the folder itself."""
    if why_no_box():
        return Place([], f"{folder}/library", f"{folder}/work")
    library = ["--ro-bind", f"{folder}/library", "/library", "--remount-ro", "/"]
    return Place([*options(), *library, "--chdir", "/tmp", "--"], "/library", "/tmp")


def options() -> list[str]:
    command = ["bwrap", "--die-with-parent"]
    if os.getuid() == 0:
        command += [*NAMESPACES_FOR_ROOT.split(), *RIGHTS_OF_ROOT.split()]
    else:
        command += ["--unshare-all"]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    # before Python, which may be inside it
    command += ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    for path in SYSTEM:
        command += ["--ro-bind-try", path, path]
    for prefix in map(Path, (sys.prefix, sys.base_prefix)):
        # also if only root may look into one of these folders
        for folder in [*[*reversed(prefix.parents)][1:], prefix]:
            command += ["--perms", "0755", "--dir", str(folder)]
        for path in map(str, prefix.iterdir()):
            command += ["--ro-bind", path, path]
    return command


@cache
def why_no_box() -> str:
    """Why the system can make none: a sentence, or nothing if it can. It is tried once."""
    if shutil.which("bwrap") is None:
        return f"there is no bwrap (apt install bubblewrap); {WITHOUT}"
    command = [*options(), "--", sys.executable, "-I", "-c", "pass"]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode == 0:
        return ""
    said = tried.stderr.strip() or f"exit status {tried.returncode}"
    return f"bwrap can make no box here ({said.splitlines()[-1]}); {WITHOUT}"
