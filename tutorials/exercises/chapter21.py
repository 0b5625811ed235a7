"""Your answers to the exercises of chapter 21. To check them: python -m tutorials.check 21"""

import torch
from torch import Tensor

from nanovllm.topics.quantization.groups import SMALLEST_SCALE, quantize


# --- 21.1 ---
def quantized(numbers: list[float], bits: int) -> tuple[list[int], float, int]:
    """The codes of a group of weights, from 0 to 2**bits - 1, its scale and its zero, as the lines
    of chapter 21 make them: halves are rounded to even, as by `round`. If all numbers are 0, so are
    all that come back."""
    raise NotImplementedError


# --- 21.2 ---
def decode_speed(
    num_weights: float,
    numbers_per_token: float,
    context: int,
    weight_bits: float,
    cache_bits: float,
    memory: float,
    bytes_per_second: float,
    flops_per_second: float,
) -> float:
    """Tokens per second, at most, if the memory is full of sequences that decode.

    Memory holds the weights, and for each sequence the keys and values of `context` tokens:
    `numbers_per_token` numbers each. A step reads all that once, and gives a token to each sequence,
    with two FLOPs per weight. It takes the longer of the two times. 0 if no sequence fits.
    """
    raise NotImplementedError


# --- 21.3 ---
def product(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """x [T, in] times a weight in 4 bits: fp32 [T, out], with sums of integers.

    `codes` [out, groups, size] are uint8 from 0 to 15, `scales` [out, groups] fp32, and `zeros`
    [out, groups] uint8. Each group of a row of x gets a scale, and integers from -127 to 127.
    """
    raise NotImplementedError
