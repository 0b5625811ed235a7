"""Whatever a file has left is removed: folders of any depth, shared memory, messages. Removing raises nothing.

Run: pytest tests/course/test_leftovers.py
"""

import ctypes
import os
import sys

import pytest
from submissions import UID, for_root

from tutorials.assignments import leftovers
from tutorials.assignments.kernel_objects import NUMBERS, owned_by, remove_ipc
from tutorials.assignments.leftovers import remove, temporary_folder
from tutorials.assignments.walls import become

NUM_LEVELS = 2100  # twice what Python recurses, and a path longer than the system takes


def deepen(folder, num_levels: int = NUM_LEVELS) -> None:
    """Folders in folders, with a file in each."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        for _ in range(num_levels):
            open("file", "w").close()
            os.mkdir("folder")
            os.chdir("folder")
    finally:
        os.chdir(here)


def test_a_folder_deeper_than_python_recurses(tmp_path):
    with temporary_folder(tmp_path) as path:
        deepen(path)
    assert not [*tmp_path.iterdir()]


def test_a_folder_may_hold_anything(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("important")
    path = tmp_path / "path"
    for name in ("a/b/c", "a/b/d", "e/f", "e/b"):
        (path / name).mkdir(parents=True)
        (path / name / "link").symlink_to(kept)
        (path / name / "nowhere").symlink_to("nowhere")
    os.mkfifo(path / "e/fifo")
    open(os.fsencode(path / "e") + b"/\xff", "w").close()
    for name in ("a/b/c", "a/b", "e"):
        (path / name).chmod(0)
    remove(path)
    assert [*tmp_path.iterdir()] == [kept]
    assert (kept / "file").read_text() == "important"


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    remove(tmp_path / "link")
    remove(tmp_path / "nothing")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_cannot_be_removed_is_named_and_the_rest_is_removed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "path"
    for name in ("a", "b", "c"):
        (path / name).mkdir(parents=True)
    remove_in = leftovers.remove_in

    def refuses_b(top, name, new_names):
        if name == "b":
            raise OSError("held fast")
        remove_in(top, name, new_names)

    monkeypatch.setattr(leftovers, "remove_in", refuses_b)
    remove(path)
    assert [entry.name for entry in path.iterdir()] == ["b"]
    assert "this could not be removed" in capsys.readouterr().err


@for_root
def test_shared_memory_semaphores_and_messages_of_a_user():
    if not all(os.path.exists(f"/proc/sysvipc/{kind}") for kind in NUMBERS):
        pytest.skip("the system has no such objects")
    pid = os.fork()
    if pid == 0:
        try:
            become(UID, UID)
            libc = ctypes.CDLL(None)
            libc.shmget(0, 4096, 0o600)
            libc.msgget(0, 0o600)
            libc.semget(0, 1, 0o600)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert [len(owned_by(UID, kind)) for kind in NUMBERS] == [1, 1, 1]
    remove_ipc(UID)
    assert not any(owned_by(UID, kind) for kind in NUMBERS)


@pytest.mark.skipif(sys.platform == "linux", reason="Linux has a list of them")
def test_a_system_without_a_list_of_objects():
    assert owned_by(os.getuid(), "shm") == []
