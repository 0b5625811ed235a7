"""The product with weights in 8 or 4 bits in Triton. The kernel is that of
layers/triton_products.py."""

from torch import Tensor

from nanovllm.layers.triton_products import multiply
from nanovllm.topics.quantization.groups import Groups


def product(
    x: Tensor,
    weight: Groups,
    pairs: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x [T, in] times the weight: [T, out], in the dtype of x. With pairs, see layers/experts.py,
    the weight has the matrices of all experts, one below the other: [P, out]."""
    codes, scales, zeros = weight
    bits = 4
    if zeros is None:
        bits = 8
        zeros = scales  # which are not read
    return multiply(x, codes, scales, zeros, scales.shape[1], bits, pairs)


def product_of_pairs(
    x: Tensor,
    _: Tensor,
    pairs: tuple[Tensor, Tensor],
    weight: Groups,
) -> Tensor:
    """Takes the place of experts.product. The matrices are in `weight`."""
    return product(x, weight, pairs)
