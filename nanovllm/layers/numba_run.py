"""Runs compiled loops: tensors as arrays, and the programs of a kernel on several threads."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

SMALL = 2**22  # multiplications: with fewer, a second thread is not worth its start
INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def array(tensor: Tensor) -> np.ndarray:
    """The same memory as a numpy array. Of 16-bit numbers, numba knows only integers: see
    numba_kernels.as_float32."""
    tensor = tensor.detach().contiguous()
    integer = INTEGERS.get(tensor.dtype)
    return tensor.numpy() if integer is None else tensor.view(integer).numpy()


@cache
def pool(process: int) -> ThreadPoolExecutor:
    """The threads of this process: a forked process has none of them."""
    return ThreadPoolExecutor(os.cpu_count(), "kernels")


def run(kernel: Callable, arguments: tuple, num_programs: int, work: int) -> None:
    """Runs all programs of a kernel. If there is enough work, on as many threads as PyTorch
    uses."""
    num_threads = min(torch.get_num_threads(), num_programs) if work >= SMALL else 1
    if num_threads <= 1:
        kernel(*arguments, 0, num_programs)
        return
    ends = [num_programs * i // num_threads for i in range(num_threads + 1)]
    (begin, end), *others = pairwise(ends)
    threads = pool(os.getpid())
    running = [threads.submit(kernel, *arguments, *part) for part in others]
    kernel(*arguments, begin, end)
    for one in running:
        one.result()
