"""The product with weights in 8 or 4 bits in Triton. The kernel is that of
layers/triton_products.py."""

from torch import Tensor

from nanovllm.layers.experts import Pairs
from nanovllm.layers.linear import Groups, Quantized
from nanovllm.layers.triton_products import multiply
from nanovllm.topics.quantization import int8
from nanovllm.topics.quantization.groups import Product


def product(x: Tensor, weight: Groups, pairs: Pairs | None = None) -> Tensor:
    """x [T, in] times the weight: [T, out], in the dtype of x. With pairs, see layers/experts.py,
    the weight has the matrices of all experts, one below the other: [P, out]."""
    codes, scales, zeros = weight
    bits = 4
    if zeros is None:
        bits = 8
        zeros = scales  # which are not read
    return multiply(x, codes, scales, zeros, scales.shape[1], bits, pairs)


def product_of(weight: Groups, num_experts: int | None) -> Quantized:
    """The product with any weight. On a CPU, the kernel is interpreted: oneDNN's is faster."""
    if num_experts is None and int8.can_multiply(weight):
        return int8.Int8Product(weight)
    return Product(weight, product)
