"""Section 2: every Triton kernel against PyTorch."""

import math
import mmap
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from measure.first_contact.section import Section
from nanovllm.device import memory
from nanovllm.layers import attention, torch_ops
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.sampler import Sampling
from nanovllm.swapping.host_cache import HostCache
from tutorials.performance.batches import random_batch

HEADS = 16  # this and the next three: Qwen3-0.6B's attention
KV_HEADS = 8
HEAD_DIM = 128
BLOCK_SIZE = 16
SCALE = HEAD_DIM**-0.5
MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.11 on


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are NaN, or the largest integer: a result that is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def difference(actual: torch.Tensor, expected: torch.Tensor, allowed: float = 2e-2) -> dict:
    """The largest error, NaN included, and the largest number, of which `allowed` is a share."""
    error = (actual.float() - expected.float()).abs().max().item()
    largest = expected.float().abs().max().item()
    result = {"difference": error, "of": largest}
    return result if error <= allowed * largest else result | {"error": f"it differs by {error:g}"}


def worst(*results: dict) -> dict:
    """The result with an error, or with the largest difference."""
    return max(results, key=lambda result: ("error" in result, result["difference"]))


def kernels(section: Section) -> None:
    """All Triton kernels against PyTorch; outputs are NaN before, and so is what nobody owns."""
    sizes = section.sizes
    section.case("add_and_norm", partial(check_norm, section))
    section.case("norm_and_rotate", partial(check_rotation, section))
    section.case("silu_and_mul", partial(check_silu, section))
    section.case("sample", partial(check_sample, section))
    section.case(f"{sizes.swaps} swaps", partial(check_swaps, section))
    rng = random.Random(0)
    for count, longest in sizes.decodes.items():
        contexts = [longest, *(rng.randint(1, longest) for _ in range(count - 1))]
        decodes = [(1, context) for context in contexts]
        check_attention(section, f"{count} decodes", decodes, sizes.splits)
    check_attention(section, "prefill", list(sizes.prompts), (0,))
    mixture = [(1, 1), (1, sizes.prompts[0][1]), (1, 17), *sizes.prompts]
    check_attention(section, "decodes, then chunks", mixture, sizes.splits[:3])
    section.case("far blocks", partial(check_far_blocks, section))
    section.show("kernel|largest error|of numbers up to", [("difference", ".1e"), ("of", ",.1f")])


def batch_of(section: Section, sequences: list[tuple[int, int]]) -> tuple[Batch, torch.Tensor]:
    """The batch, and the keys and values to be stored: [2, tokens, KV heads, head dim]."""
    num_blocks = sum(-(-context // BLOCK_SIZE) for _, context in sequences) + 8
    batch, keys = random_batch(sequences, KV_HEADS, HEAD_DIM, BLOCK_SIZE, num_blocks, num_layers=1)
    for field, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            dtype = section.dtype if value.is_floating_point() else None
            setattr(batch, field, value.to(section.device, dtype))
    batch.kv_cache = KVCache(batch.kv_cache.tensor.to(section.device, section.dtype))
    new = torch.cat([kv[:, 0, -length:] for kv, (length, _) in zip(keys, sequences)], dim=1)
    return batch, new.to(section.device, section.dtype)


def check_attention(
    section: Section, name: str, sequences: list[tuple[int, int]], all_splits: tuple[int, ...]
) -> None:
    """Keys and values are stored, and read by kernels with several numbers of splits."""
    from nanovllm.layers import triton_attention

    prepared: list[tuple] = []  # queries, the batch, and what they attend to

    def stored() -> dict:
        batch, new = batch_of(section, sequences)
        expected_cache = KVCache(batch.kv_cache.tensor.clone())
        torch_ops.store_kv(*new, replace(batch, kv_cache=expected_cache), 0)
        triton_attention.store_kv(*views_of(new), batch, 0)
        q = randn(section, new.shape[1], HEADS, HEAD_DIM)
        expected_batch = replace(batch, kv_cache=expected_cache)
        prepared.append((q, batch, attention.paged_attention(q, expected_batch, 0, SCALE)))
        found = batch.kv_cache.tensor.nan_to_num(99)
        return difference(found, expected_cache.tensor.nan_to_num(99), 0)

    def attended(splits: int) -> dict:
        ((q, batch, expected),) = prepared
        batch.layout = splits or triton_attention.layout(batch)
        with poisoned():
            out = triton_attention.paged_attention(q, batch, 0, SCALE)
        return difference(out, expected)

    section.case(f"{name}: store_kv", stored)
    if not prepared:
        return  # it has failed, or there was no time
    for splits in all_splits:
        section.case(f"{name}: {splits or 'default'} splits", partial(attended, splits))


def views_of(new: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys and values as in the model, where they are views of something larger."""
    return torch.cat([new[0], new[1]], dim=1).split(new.shape[2], dim=1)


def check_far_blocks(section: Section) -> dict:
    """Blocks whose numbers are more than 2**31 away from the first give what near ones give."""
    from nanovllm.layers import triton_attention

    near, new = batch_of(section, [(1, 40), (1, 7), (9, 30)])
    if not section.cpu and memory.free_memory(section.device) < 2**34:
        return {"left_out": "it needs 16 GiB"}
    far, first = moved_away(near)
    q = randn(section, new.shape[1], HEADS, HEAD_DIM)
    results = []
    for batch in (near, far):
        triton_attention.store_kv(*views_of(new), batch, 0)
    found = far.kv_cache.tensor[:, :, first:].nan_to_num(99)
    results.append(difference(found, near.kv_cache.tensor.nan_to_num(99), 0))
    for splits in (1, 2):
        near.layout = far.layout = splits
        expected = triton_attention.paged_attention(q, near, 0, SCALE)
        results.append(difference(triton_attention.paged_attention(q, far, 0, SCALE), expected, 0))
    blocks = far.kv_cache.tensor
    triton_attention.copy_blocks(far.kv_cache, [(first, 0), (first + 1, first + 2)])
    for source, target in ((first, 0), (first + 1, first + 2)):
        pair = (blocks[:, :, i].nan_to_num(99) for i in (target, source))
        results.append(difference(*pair, 0))
    return worst(*results)


def moved_away(batch: Batch) -> tuple[Batch, int]:
    """The same batch in a cache with so many blocks before its own that 32 bits cannot count their
    numbers, and the first of its own.

    Before the cache is memory, too: where a kernel reads whose addresses wrap around.
    """
    near = batch.kv_cache.tensor
    first = 2**31 // near[0, 0, 0].numel() + 1
    num_blocks = first + near.shape[2]
    shape = (2, near.shape[1], num_blocks, *near.shape[3:])
    numbers = untouched(2**31 + math.prod(shape), near)
    far = numbers[2**31 :].view(shape)
    far[:, :, first:] = near
    moved = replace(
        batch,
        kv_cache=KVCache(far),
        slot_mapping=batch.slot_mapping + first * near.shape[3],
        block_tables=batch.block_tables + first,
    )
    return moved, first


def untouched(size: int, like: torch.Tensor) -> torch.Tensor:
    """On a CPU only addresses: what is never written takes no memory, and is 0."""
    if like.is_cuda:
        return like.new_empty(size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    pages = mmap.mmap(-1, size * like.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=like.dtype)


def randn(section: Section, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=section.device).to(section.dtype)


def norm(section: Section, size: int) -> torch.nn.RMSNorm:
    layer = torch.nn.RMSNorm(size, 1e-6).to(section.device, section.dtype).requires_grad_(False)
    layer.weight.data.add_(0.2 * randn(section, size))
    return layer


def check_norm(section: Section) -> dict:
    from nanovllm.layers import triton_ops

    x = randn(section, section.sizes.rows, 1024)
    update = randn(section, section.sizes.rows, 1024)
    layer = norm(section, 1024)
    expected = torch_ops.add_and_norm(x.clone(), update, layer)
    with poisoned():
        found = triton_ops.add_and_norm(x, update, layer)
    return worst(*map(difference, found, expected))


def check_rotation(section: Section) -> dict:
    from nanovllm.layers import triton_ops

    rows = section.sizes.rows
    heads = [HEADS, KV_HEADS, KV_HEADS]
    angles = torch.randn(rows, HEAD_DIM // 2, device=section.device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    qkv = randn(section, rows, sum(heads), HEAD_DIM)
    norms = [norm(section, HEAD_DIM) for _ in range(2)]
    expected = torch_ops.norm_and_rotate(qkv.clone(), *norms, cos_sin, heads)
    rotated = triton_ops.norm_and_rotate(qkv, *norms, cos_sin, heads)
    return worst(*map(difference, rotated, expected))


def check_silu(section: Section) -> dict:
    from nanovllm.layers import triton_ops

    x = randn(section, section.sizes.rows, 2 * 3072)
    with poisoned():
        out = triton_ops.silu_and_mul(x)
    return difference(out, torch_ops.silu_and_mul(x))


def check_sample(section: Section) -> dict:
    """Sums in another order may move a token to its neighbor, very rarely, and never a greedy one.

    The difference is the share of such rows.
    """
    from nanovllm.layers import triton_ops

    rows = section.sizes.rows
    logits = 4 * randn(section, rows, section.sizes.vocab)
    numbers = torch.arange(rows, device=section.device)
    sampling = Sampling((numbers % 4) * 0.5, seed=numbers * 3**30, position=numbers + 100)
    with poisoned():
        tokens = triton_ops.sample(logits, sampling)
    unequal = tokens != torch_ops.sample(logits, sampling)
    share = unequal.float().mean().item()
    result = {"difference": share, "of": 1}
    if share > 0.02 or unequal[::4].any():
        result["error"] = f"{share:.1%} of the tokens differ"
    return result


def check_swaps(section: Section) -> dict:
    """Blocks go out, are overwritten at once, and come back elsewhere.

    The difference is the share of the swaps that came back wrong.
    """
    rng = random.Random(0)
    cache = randn(section, 2, section.sizes.swapped_layers, 64, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    host = HostCache(KVCache(cache), 50)
    wrong = 0
    for _ in range(section.sizes.swaps):
        blocks, places, host_ids = (rng.sample(range(n), 48) for n in (64, 64, 50))
        expected = cache[:, :, blocks]
        host.swap_out(dict(zip(blocks, host_ids)))
        cache[:, :, blocks] = torch.nan
        host.swap_in(dict(zip(host_ids, places)))
        wrong += not torch.equal(cache[:, :, places], expected)
        cache.normal_()
    result = {"difference": wrong / section.sizes.swaps, "of": 1}
    return result | {"error": f"{wrong} came back wrong"} if wrong else result
