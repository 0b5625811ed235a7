"""Kernels: compares each kernel with plain PyTorch on this machine, before the first request.

`runner` is a ModelRunner, which imports this module.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanovllm.backends import torch_ops
from nanovllm.layers.experts import Stack
from nanovllm.layers.sampler import Sampling
from nanovllm.models.experts import Router
from nanovllm.options import refusal
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Request
from nanovllm.step import StepInputs

LAYERS = 2  # of the model: a wrong kernel shows in these, before rounding has added up
CONTEXT = 600  # tokens: attention computes it in several parts
MOST_ERROR = 0.05  # of a row's length; bfloat16 rounds to 0.004
OPERATIONS = (
    "add_and_norm",
    "rotate_and_store",
    "silu_and_mul",
    "paged_attention",
    "experts",
)


@torch.inference_mode()
def check_kernels(runner: Any) -> None:
    """Puts one operation after the other of the runner's backend into the model, and compares its
    hidden states with those of torch_ops; then a recorded step with the model. Raises
    ValueError with all that is wrong. The KV cache holds nothing yet, and zeros afterwards."""
    num_blocks = min(-(-CONTEXT // runner.shape.block_size), runner.num_blocks // 2)
    if not num_blocks:
        return
    cache = runner.kv_cache
    used = cache.tensor[:, :, : 2 * num_blocks]
    generator = torch.Generator(runner.device).manual_seed(0)  # not the user's
    numbers = cache.restored(used, torch.float32).normal_(generator=generator)
    used.copy_(cache.stored(numbers, used.dtype))
    own = vars(runner.ops)
    errors = {}

    decoder = runner.model.model
    layers = decoder.layers
    decoder.layers = layers[-LAYERS:]  # in a hybrid model, one of each kind
    modules = [*decoder.modules()]
    routers = [(module, module.top) for module in modules if isinstance(module, Router)]
    for router, _ in routers:
        router.top = len(router.weight)  # a rounded row may choose other experts, if not all
    both = step_of(runner, num_blocks, [1, 20])
    expected = hidden_states(runner, both, torch_ops)
    for name in OPERATIONS:
        mixed = SimpleNamespace(**vars(torch_ops) | {name: own[name]})
        if name == "paged_attention":
            mixed.layout = own["layout"]
        errors[name] = error(hidden_states(runner, both, mixed), expected)
    if cache.states:
        mixed = SimpleNamespace(**vars(torch_ops) | {"delta_rule": own["delta_rule"]})
        hidden = hidden_states(runner, both, mixed)
        errors["the delta rule"] = error(hidden, expected)
    stacks = [(module, module.product) for module in modules if isinstance(module, Stack)]
    for stack, _ in stacks:
        stack.product = plain_product_of(stack)
    if stacks:
        hidden = hidden_states(runner, both, torch_ops)
        errors["the grouped product"] = error(hidden, expected)
    for stack, product in stacks:
        stack.product = product
    for router, top in routers:
        router.top = top
    decoder.layers = layers
    use(runner.ops, runner.model)

    if runner.recorder is not None:
        decode = step_of(runner, num_blocks, [1])
        expected = hidden_states(runner, decode, runner.ops)
        hidden, _ = runner.forward(decode)
        errors["a recorded step"] = error(hidden[:1], expected)
    copies = torch.tensor([(0, num_blocks)], device=runner.device)
    runner.ops.copy_blocks(cache, copies)
    is_same = used[:, :, 0].equal(used[:, :, num_blocks])
    errors["copy_blocks"] = float(not is_same)
    errors["sample"] = error_of_draws(runner, generator)
    used.zero_()
    # NaN is wrong, too
    wrong = [f"{name} {value:.0%}" for name, value in errors.items() if not value <= MOST_ERROR]
    if wrong:
        problem = f"its numbers differ from PyTorch's here: {', '.join(wrong)}"
        remedy = "take attention_backend='torch' and enforce_eager=True"
        raise refusal("attention_backend", own["NAME"], f"{problem}; {remedy}")


def step_of(runner: Any, num_blocks: int, chunks: list[int]) -> StepInputs:
    """The last tokens of some sequences, each in blocks of its own."""
    schedule = Schedule()
    length = min(CONTEXT, runner.limits.max_model_len, num_blocks * runner.shape.block_size)
    for i, chunk in enumerate(chunks):
        token_ids = [j % runner.vocab_size for j in range(i, i + length)]
        (seq,) = Request("", None, token_ids, SamplingParams()).sequences
        seq.block_table = [*range(i * num_blocks, (i + 1) * num_blocks)]
        num_tokens = min(chunk, length)
        schedule.items.append(Item(seq, length - num_tokens, num_tokens))
    return runner.prepare(schedule)


def use(ops: Any, model: Any) -> None:
    """Gives all layers this backend."""
    for module in model.modules():
        if hasattr(module, "ops"):
            module.ops = ops


def hidden_states(runner: Any, inputs: StepInputs, ops: Any) -> Tensor:
    """The hidden states that the model computes with this backend."""
    use(ops, runner.model)
    inputs = inputs.to(runner.device)
    inputs.batch.layout = ops.layout(inputs.batch)
    return runner.model(inputs.input_ids, inputs.positions, inputs.batch)


def error_of_draws(runner: Any, generator: torch.Generator) -> float:
    """The share of rows that get another token. Rounding may change one."""
    logits = torch.randn(32, runner.vocab_size, device=runner.device, generator=generator)
    logits = (4 * logits).to(runner.dtype)  # a few tokens are likely, as in a model
    seed = torch.arange(32, device=runner.device)
    ones = torch.ones_like(seed, dtype=torch.float32)
    sampling = Sampling(ones, seed, seed, top_p=0.9 * ones)
    found = runner.ops.sample(logits, sampling)
    is_other = found != torch_ops.sample(logits, sampling)
    return float(is_other.sum()) / 32


def plain_product_of(stack: Stack) -> Callable[..., Tensor]:
    """The grouped product in PyTorch, also with matrices in few bits."""
    weight = stack.quantized
    if weight is None:
        return torch_ops.grouped_product
    from nanovllm.topics.quantization import experts, groups, layers  # chapter 21

    plain = partial(groups.Product, multiply=groups.plain_product)
    assert stack.num_experts is not None
    product = experts.product_of(weight.weight(), stack.num_experts, plain)
    return partial(layers.multiply_pairs, product=product)


def error(found: Tensor, expected: Tensor) -> float:
    """The error of the worst row, as a share of its length."""
    rows = expected.float()
    differences = found - rows
    shares = differences.norm(dim=1) / rows.norm(dim=1)
    return float(shares.max())
