"""Heap: how glibc, if it is there, keeps or returns the memory of large tensors on a CPU."""

import ctypes


def keep_freed_memory() -> None:
    """Tells glibc to keep large freed tensors, which it would return at once.

    The next step would have to fault all their pages in again.
    """
    # pythonapi exists on each system; it finds what is in Python and in the C library below it
    if hasattr(ctypes.pythonapi, "mallopt"):
        ctypes.pythonapi.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: keep up to 1 GiB of free memory
        ctypes.pythonapi.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: 32 MiB is the maximum


def trim() -> None:
    """Gives memory back that glibc would keep: that of the first form of a weight."""
    if hasattr(ctypes.pythonapi, "malloc_trim"):
        ctypes.pythonapi.malloc_trim(0)
