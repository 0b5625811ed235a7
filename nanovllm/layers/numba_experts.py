"""The grouped product of layers/experts.py in compiled Python: one kernel for all experts that are
hit."""

import numpy as np
from torch import Tensor

from nanovllm.layers import experts
from nanovllm.layers.numba_products import pairs_kernel
from nanovllm.layers.numba_run import array, run
from nanovllm.layers.numba_step import PLAIN, Weights, new_rows
from nanovllm.layers.numba_tiles import ARE_FASTEST

FEW_PAIRS = 128  # with more, PyTorch's products are faster, unless tiles are


def product(x: Tensor, matrices: Tensor, pairs: experts.Pairs) -> Tensor:
    """x [T, in], matrices [E, out, in] -> [P, out]: see experts.product."""
    num_pairs = len(pairs.rows)
    num_experts, num_out, _ = matrices.shape
    if num_pairs > FEW_PAIRS and not ARE_FASTEST:
        return experts.product(x, matrices, pairs)
    rows = new_rows(x[pairs.rows], PLAIN)
    nothing = np.zeros((num_experts, num_out), np.float32)
    weights = Weights(array(matrices), nothing, nothing, biases=nothing)
    out = x.new_empty(num_pairs, num_out)
    arguments = (array(out), rows, weights, pairs.ends.numpy())
    run(pairs_kernel(PLAIN.multiply), arguments, num_out, num_pairs * matrices[0].numel())
    return out
