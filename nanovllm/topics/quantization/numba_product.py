"""Products with weights in 4 and 8 bits, in compiled Python. The kernels are in
layers/numba_products.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.experts import Pairs
from nanovllm.layers.linear import Groups, Quantized
from nanovllm.layers.numba_lanes import LANES
from nanovllm.layers.numba_products import IN_4_BITS, bytes_of_rows, multiply_pairs
from nanovllm.layers.numba_run import array, run
from nanovllm.layers.numba_step import Weights, new_rows
from nanovllm.topics.quantization import experts, int8


def in_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes int8.in_bytes in one pass."""
    codes = torch.empty(x.shape, dtype=torch.int8)
    numbers = codes.view(torch.uint8)
    scales = torch.empty(len(x), 1)
    tensors = (codes, numbers, scales, x)
    arguments = (*map(array, tensors),)
    run(bytes_of_rows, arguments, len(x), x.numel())
    return numbers, scales


class InLanes:
    """The product with a weight in 4 bits. It is a `Quantized`, see layers/linear.py. With experts,
    it has the matrices of all of them, one below the other: one kernel computes all pairs."""

    def __init__(self, weight: Groups, num_experts: int | None):
        codes, scales, zeros = weight
        assert zeros is not None, "a weight in 4 bits has zeros"
        self.group = codes.shape[2]
        num_matrices = num_experts or 1
        self.num_out = len(codes) // num_matrices
        self.num_groups = scales.shape[1]
        of_matrices = zip(
            codes.chunk(num_matrices),
            scales.chunk(num_matrices),
            zeros.chunk(num_matrices),
        )
        matrices = [in_lanes(*parts) for parts in of_matrices]
        self.parts = matrices[0]
        if num_experts is not None:
            stacks = map(torch.stack, zip(*matrices))
            self.parts = [*stacks]
        self.held = Groups(*self.parts)

    def __call__(self, x: Tensor, pairs: Pairs | None = None) -> Tensor:
        """x [T, in] times the weight: fp32 [T, out], or [P, out] for pairs."""
        arrays = [*map(array, self.parts)]
        if pairs is not None:
            rows = x[pairs.rows]
            ends = pairs.ends.numpy()
            results = self.multiply(multiply_pairs, rows, arrays, ends)
            return pairs.placed(results)
        layers = [part[None] for part in arrays]
        kernel = IN_4_BITS.multiply
        num_rows = len(x)
        return self.multiply(kernel, x, layers, 0, num_rows)

    def multiply(
        self,
        kernel: Callable,
        x: Tensor,
        arrays: list[np.ndarray],
        *where: Any,
    ) -> Tensor:
        numbers = x.float().contiguous()
        rows = new_rows(numbers, IN_4_BITS, self.group)
        run(IN_4_BITS.prepare, (rows,), len(x), x.numel())
        out = torch.empty(len(x), self.num_out)
        codes, scales, zeros = arrays
        biases = np.zeros((len(codes), self.num_out), np.float32)
        weights = Weights(codes, scales, zeros, biases)
        arguments = (out.numpy(), rows, weights, *where)
        work = x.numel() * self.num_out
        run(kernel, arguments, self.num_out, work)
        return out

    def weight(self) -> Groups:
        codes, scales, zeros = self.parts
        codes = codes.movedim(-2, -4)
        codes = codes.flatten(-2)
        codes = codes.flatten(-4, -3)
        codes = codes[..., : self.num_out, :, :]
        codes = codes.flatten(0, -3)
        parts = [codes]
        for numbers in (scales, zeros):
            rows = numbers.mT
            rows = rows.flatten(-3, -2)
            rows = rows[..., : self.num_out, : self.num_groups]
            parts.append(rows.flatten(0, -2))
        return Groups(*parts)


def in_lanes(codes: Tensor, scales: Tensor, zeros: Tensor) -> list[Tensor]:
    """A weight as add_pair reads it: codes uint8 [blocks, pairs, group / 4, LANES, 4], scales fp32
    and zeros uint8 [blocks, groups, LANES]. Numbers that lacked are 0."""
    num_out, num_pairs, group = codes.shape
    lacking = -num_out % LANES
    padded = F.pad(codes, (0, 0, 0, 0, 0, lacking))
    blocks = padded.view(-1, LANES, num_pairs, group // 4, 4)
    blocks = blocks.permute(0, 2, 3, 1, 4)
    parts = [blocks.contiguous()]
    for numbers in (scales, zeros):
        lacking_groups = 2 * num_pairs - numbers.shape[1]
        padded = F.pad(numbers, (0, lacking_groups, 0, lacking))
        blocks = padded.unflatten(0, (-1, LANES))
        parts.append(blocks.mT.contiguous())
    return parts


def product_of(weight: Groups, num_experts: int | None) -> Quantized:
    """The product with any weight on a CPU."""
    if weight.zeros is not None:
        return InLanes(weight, num_experts)
    return experts.product_of(weight, num_experts, partial(int8.product_of, in_bytes=in_bytes))
