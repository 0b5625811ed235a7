"""Checks of chapter 21: codes of a group, bits for weights or for the cache, a product of integers."""

import random

import torch

from nanovllm.topics.quantization.groups import (
    Groups,
    in_4_bits,
    integers_of,
    packed,
    plain_product,
)
from nanovllm.topics.simulator.cost_model import HARDWARE, SHAPES, shape_of
from tutorials.exercises.checks.expect import expect, unchanged


def codes_of(numbers: list[float], bits: int) -> tuple[list[int], float, int]:
    most = 2**bits - 1
    low, high = min(0.0, *numbers), max(0.0, *numbers)
    scale = (high - low) / most or 1.0
    zero = round(-low / scale)
    return [min(max(round(n / scale) + zero, 0), most) for n in numbers], scale, zero


def check_1(answers) -> None:
    rng = random.Random(0)
    cases = {
        "numbers around 0": ([0.12, -0.31, 0.05, 0.22], 4),
        "an outlier": ([-0.18, 0.09, 2.40, -0.27], 4),
        "all above 0": ([3.0, 3.5, 4.0, 4.5], 4),
        "all below 0": ([-3.0, -7.0, -5.5], 4),
        "2 bits, small numbers": ([-1e-4, 2e-5, 9e-5, 11e-5], 2),
        "8 bits": ([rng.gauss(0, 1) for _ in range(64)], 8),
        "3.5 scales on each side, which round to 4": ([-0.5, 0.5, 0.1], 3),
        "halves, the zero is 3": ([-3.0, 4.0, 0.5, 1.5], 3),
        "2.5 scales below 0, which round to 2": ([-2.5, 4.5, 1.0], 3),
    }
    for case, (numbers, bits) in cases.items():
        codes, scale, zero = unchanged(answers.quantized, numbers, bits)
        right, right_scale, right_zero = codes_of(numbers, bits)
        fits = abs(scale - right_scale) < 1e-6 * right_scale
        expect(fits, f"{case}: the scale should be {right_scale:.4f}, but you say {scale:.4f}")
        expect(zero == right_zero, f"{case}: the zero should be {right_zero}, but you say {zero}")
        allowed = all(code in range(2**bits) for code in codes)
        expect(allowed, f"{case}: the codes {codes} are not all from 0 to {2**bits - 1}")
        expect(list(codes) == right, f"{case}: the codes should be {right}, but you say {codes}")
    codes, scale, zero = answers.quantized([0.0, 0.0], 4)
    back = [(code - zero) * scale for code in codes]
    expect(back == [0, 0], f"two zeros come back as {back}")


def check_2(answers) -> None:
    shape, gpu = shape_of(SHAPES["qwen3-8b"], itemsize=2), HARDWARE["h100"]
    weights, numbers = shape.weight_bytes / 2, shape.kv_bytes / 2
    machine = gpu.memory_bytes, gpu.bytes_per_second, gpu.flops_per_second
    cases = {
        "Qwen3-8B on an H100, all in 16 bits": (weights, numbers, 1000, 16, 16, *machine),
        "weights in 4.31 bits": (weights, numbers, 1000, 4.3125, 16, *machine),
        "the cache in 8.25 bits": (weights, numbers, 1000, 16, 8.25, *machine),
        "contexts of 10 tokens, where arithmetic is the limit": (
            weights,
            numbers,
            10,
            4.3125,
            8.25,
            *machine,
        ),
        "one sequence fits": (1000, 8, 100, 16, 16, 3600, 1e6, 1e9),
        "no sequence fits": (1000, 8, 100, 16, 16, 3500, 1e6, 1e9),
        "no room for the weights": (1000, 8, 100, 16, 16, 1500, 1e6, 1e9),
    }
    for case, given in cases.items():
        said, right = unchanged(answers.decode_speed, *given), speed_of(*given)
        fits = abs(said - right) <= 1e-9 * right
        expect(fits, f"{case}: {right:,.0f} tokens/s, but decode_speed says {said:,.0f}")


def speed_of(weights, numbers, context, weight_bits, cache_bits, memory, bytes_rate, flops_rate):
    weight_bytes, each = weights * weight_bits / 8, numbers * context * cache_bits / 8
    num_seqs = max(0, int((memory - weight_bytes) // each))
    reading = (weight_bytes + num_seqs * each) / bytes_rate
    return num_seqs / max(reading, 2 * weights * num_seqs / flops_rate)


def check_3(answers) -> None:
    torch.manual_seed(0)
    for case, (num_rows, num_out, size, num_groups) in {
        "one row, one group": (1, 5, 8, 1),
        "three groups": (4, 6, 8, 3),
        "groups of 128": (16, 64, 128, 4),
    }.items():
        weight = in_4_bits(torch.randn(num_out, num_groups * size) - 0.3, size)
        assert weight.zeros is not None  # as always with 4 bits
        zeros = weight.zeros
        codes = (integers_of(weight, slice(None)) + zeros.unsqueeze(-1)).to(torch.uint8)
        x = torch.randn(num_rows, num_groups * size)
        x[:, :size] *= 50  # the first group has another scale than the others
        judge_product(answers, case, x, codes, weight)
    x[0, :128] = 0
    judge_product(answers, "a group of activations that are all 0", x, codes, weight)
    codes, zeros = torch.full_like(codes, 15), torch.zeros_like(zeros)
    x = torch.full_like(x, 0.25)
    largest = Groups(packed(codes), weight.scales, zeros)
    judge_product(answers, "the largest codes and sums", x, codes, largest)


def judge_product(answers, case: str, x: torch.Tensor, codes: torch.Tensor, weight: Groups) -> None:
    def call(rows: torch.Tensor) -> torch.Tensor:
        return unchanged(answers.product, rows, codes, weight.scales, weight.zeros)

    said, right = call(x), plain_product(x, weight)
    expect(said.shape == right.shape, f"{case}: the shape is {list(said.shape)}")
    distance = (said - right).norm() / right.norm()
    expect(distance < 1e-5, f"{case}: the product is wrong by {distance:.2%}")
    num_other = int((call(x[:1])[0] != said[0]).sum())
    expect(num_other == 0, f"{case}: alone, {num_other} numbers of the first row are others")
