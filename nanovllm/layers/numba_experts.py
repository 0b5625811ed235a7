"""The grouped product of layers/experts.py in compiled Python, for a few pairs: one kernel for
all experts that are hit."""

from torch import Tensor

from nanovllm.layers import experts
from nanovllm.layers.numba_kernels import pairs_kernel
from nanovllm.layers.numba_ops import array, run

FEW_PAIRS = 128  # with more, PyTorch's products are faster


def product(x: Tensor, matrices: Tensor, pairs: experts.Pairs) -> Tensor:
    """x [T, in], matrices [E, out, in] -> [P, out]: see experts.product."""
    num_pairs = len(pairs.rows)
    num_out = matrices.shape[1]
    if num_pairs > FEW_PAIRS:
        return experts.product(x, matrices, pairs)
    out = x.new_empty(num_pairs, num_out)
    arrays = map(array, (out, x, matrices, *pairs))
    run(pairs_kernel, (*arrays,), num_out, num_pairs * matrices[0].numel())
    return out
