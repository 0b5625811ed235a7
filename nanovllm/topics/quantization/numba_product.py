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
from nanovllm.layers.numba_products import IN_4_BITS, bytes_of_rows, pairs_kernel
from nanovllm.layers.numba_run import array, run
from nanovllm.layers.numba_step import Weights, new_rows
from nanovllm.topics.quantization import experts, int8


def in_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes int8.in_bytes in one pass."""
    codes = torch.empty(x.shape, dtype=torch.int8)
    numbers = codes.view(torch.uint8)
    scales = torch.empty(len(x), 1)
    arguments = (*map(array, (codes, numbers, scales, x)),)
    run(bytes_of_rows, arguments, len(x), x.numel())
    return numbers, scales


class InLanes:
    """The product with a weight in 4 bits. It is a `Quantized`, see layers/linear.py. With experts,
    it has the matrices of all of them, one below the other: a kernel computes all pairs."""

    def __init__(self, weight: Groups, num_experts: int | None):
        codes, scales, _ = weight
        num_matrices = num_experts or 1
        self.group = codes.shape[2]
        self.sizes = (len(codes) // num_matrices, scales.shape[1])  # outputs and groups
        parts = zip(*(part.chunk(num_matrices) for part in weight if part is not None))
        matrices = [in_lanes(*part) for part in parts]
        self.parts = matrices[0]
        if num_experts is not None:
            self.parts = [*map(torch.stack, zip(*matrices))]
        self.held = Groups(*self.parts)

    def __call__(self, x: Tensor, pairs: Pairs | None = None) -> Tensor:
        """x [T, in] times the weight: fp32 [T, out], or [P, out] for pairs."""
        arrays = [*map(array, self.parts)]
        if pairs is not None:
            kernel = pairs_kernel(IN_4_BITS.multiply)
            results = self.multiply(kernel, x[pairs.rows], arrays, pairs.ends.numpy())
            return pairs.placed(results)
        layers = [part[None] for part in arrays]
        return self.multiply(IN_4_BITS.multiply, x, layers, 0, len(x))

    def multiply(
        self, kernel: Callable, x: Tensor, arrays: list[np.ndarray], *where: Any
    ) -> Tensor:
        num_out, _ = self.sizes
        rows = new_rows(x.float().contiguous(), IN_4_BITS, self.group)
        run(IN_4_BITS.prepare, (rows,), len(x), x.numel())
        out = torch.empty(len(x), num_out)
        biases = np.zeros((len(arrays[0]), num_out), np.float32)
        arguments = (array(out), rows, Weights(*[*arrays, biases]), *where)
        run(kernel, arguments, num_out, x.numel() * num_out)
        return out

    def weight(self) -> Groups:
        num_out, num_groups = self.sizes
        codes = self.parts[0].movedim(-2, -4).flatten(-2).flatten(-4, -3)
        rows = [codes[..., :num_out, :, :].flatten(0, -3)]
        for of_groups in self.parts[1:]:
            numbers = of_groups.mT.flatten(-3, -2)
            rows.append(numbers[..., :num_out, :num_groups].flatten(0, -2))
        return Groups(*rows)


def in_lanes(codes: Tensor, scales: Tensor, zeros: Tensor) -> list[Tensor]:
    """A weight as add_pair reads it: codes uint8 [blocks, pairs, group / 4, LANES, 4], scales fp32
    and zeros uint8 [blocks, groups, LANES]. Numbers that lacked are 0."""
    num_out, num_pairs, group = codes.shape
    lacking = -num_out % LANES
    blocks = F.pad(codes, (0, 0, 0, 0, 0, lacking)).view(-1, LANES, num_pairs, group // 4, 4)

    def of_groups(numbers: Tensor) -> Tensor:
        padded = F.pad(numbers, (0, 2 * num_pairs - numbers.shape[1], 0, lacking))
        return padded.unflatten(0, (-1, LANES)).mT.contiguous()

    return [blocks.permute(0, 2, 3, 1, 4).contiguous(), of_groups(scales), of_groups(zeros)]


def product_of(weight: Groups, num_experts: int | None) -> Quantized:
    """The product with any weight on a CPU."""
    if weight.zeros is not None:
        return InLanes(weight, num_experts)
    return experts.product_of(weight, num_experts, partial(int8.product_of, in_bytes=in_bytes))
