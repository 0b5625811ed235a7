"""Removes files and folders of a student's file, whatever has become of them.

A folder may be deeper than Python recurses, and its path longer than the system takes. So nothing
goes down: a folder in a folder is moved to the top, until there is only one level."""

import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """A folder that is removed at the end. If it cannot be, a line says so."""
    path = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield path
    finally:
        remove(path)


def remove(path: str | Path) -> None:
    """Removes a file, or a folder with all that is in it. Follows no link. Raises nothing: what
    cannot be removed is named on standard error."""
    try:
        if is_folder(path):
            empty(path)
            os.rmdir(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        print(f"this could not be removed: {os.fspath(path)!r}: {error}", file=sys.stderr)


def empty(path: str | Path) -> None:
    top = open_folder(path)
    prefix = secrets.token_hex(8)  # as no file of a student is called
    new_names = (f"{prefix}-{i}" for i in count())
    stuck: set[str] = set()
    try:
        while names := {*os.listdir(top)} - stuck:
            for name in names:
                try:
                    remove_in(top, name, new_names)
                except OSError:
                    stuck.add(name)
    finally:
        os.close(top)


def remove_in(top: int, name: str, new_names: Iterator[str]) -> None:
    """Removes one thing in the folder `top`. If it is a folder, the folders in it move to `top`."""
    if not is_folder(name, top):
        os.unlink(name, dir_fd=top)
        return
    folder = open_folder(name, top)
    try:
        for inner in os.listdir(folder):
            if is_folder(inner, folder):
                os.close(open_folder(inner, folder))  # only what may be written to can be moved
                os.rename(inner, next(new_names), src_dir_fd=folder, dst_dir_fd=top)
            else:
                os.unlink(inner, dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)


def is_folder(name: str | Path, parent: int | None = None) -> bool:
    """Whether it is one itself, and no link to one."""
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def open_folder(name: str | Path, parent: int | None = None) -> int:
    """A descriptor of the folder, in which everything is allowed to us from now on."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        folder = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent)
        folder = os.open(name, flags, dir_fd=parent)
    with suppress(PermissionError):  # it is somebody else's
        os.fchmod(folder, 0o700)
    return folder
