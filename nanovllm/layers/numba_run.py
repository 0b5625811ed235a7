"""Runs compiled loops: tensors as arrays, and the programs of a kernel on several threads."""

import os
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numba.core import config
from torch import Tensor

from nanovllm.layers.numba_kernels import inlined, kernel
from nanovllm.layers.numba_openmp import find_openmp, in_team

SMALL = 2**20  # multiplications: with fewer, a second thread is not worth its start
INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
HAS_THREADS = find_openmp() and not config.DISABLE_JIT  # type: ignore[attr-defined]
PROCESS = os.getpid()  # a fork of it has none of OpenMP's threads, and would wait for them for ever


def array(tensor: Tensor) -> np.ndarray:
    """The same memory as a numpy array. Of 16-bit numbers, numba knows only integers: see
    numba_kernels.as_float32."""
    tensor = tensor.detach().contiguous()
    integer = INTEGERS.get(tensor.dtype)
    return tensor.numpy() if integer is None else tensor.view(integer).numpy()


def run(kernel: Callable, arguments: tuple, num_programs: int, work: int) -> None:
    """Runs all programs of a kernel. If there is enough work, on as many threads as PyTorch
    uses."""
    if work < SMALL:
        kernel(*arguments, 0, num_programs)
    else:
        num_threads = min(torch.get_num_threads(), num_programs)
        run_on(num_threads, in_parts(kernel), (arguments, num_programs))


def run_on(num_threads: int, function: Callable, arguments: tuple) -> None:
    """Calls function(*arguments, thread, size) in each of `size` threads, all at the same time, so
    that they may wait for each other. `size` is `num_threads` or less."""
    if HAS_THREADS and os.getpid() == PROCESS:
        on_team(function)(arguments, num_threads)
    else:
        function(*arguments, 0, 1)


@inlined
def share(num_programs, thread, num_threads):
    """The programs of this thread: from the first number to the second."""
    return num_programs * thread // num_threads, num_programs * (thread + 1) // num_threads


@cache
def in_parts(compute: Callable) -> Callable:
    """The function that computes a thread's share of a kernel's programs."""

    @kernel
    def part(arguments, num_programs, thread, size):
        begin, end = share(num_programs, thread, size)
        compute(*arguments, begin, end)

    return part


@cache
def on_team(function: Callable) -> Callable:
    @kernel
    def team(arguments, num_threads):
        in_team(function, arguments, num_threads)

    return team
