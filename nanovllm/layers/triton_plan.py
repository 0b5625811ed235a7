"""The plan of attention in Triton: which program computes what, the same in all layers of a step.

The context of a sequence may be cut into parts, each with a program of its own, so that no program
works much longer than the others, whatever the lengths are. A recorded step has always the same
number of programs. So the device plans: a replay reads new lengths, and makes a new plan.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers.batch import Batch

PART = 64  # keys of a decode that are worth a program of their own
PROGRAMS = 4  # for each multiprocessor: enough without parts


@triton.jit
def work_of_seqs(cu_seqlens_q, context_lens, seq, end_seq, TOKENS: tl.constexpr):
    """The tiles of queries of these sequences, none for padding, and the keys that each reads."""
    is_seq = seq < end_seq
    start = tl.load(cu_seqlens_q + seq, mask=is_seq, other=0)
    end = tl.load(cu_seqlens_q + seq + 1, mask=is_seq, other=0)
    context = tl.load(context_lens + seq, mask=is_seq, other=0).to(tl.int64)
    return tl.where(context > 0, tl.cdiv(end - start, TOKENS), 0), context


@triton.jit
def parts_of(context, total, share, PART: tl.constexpr):
    """The number of parts of a context: its share of the programs is its share of all keys."""
    parts = tl.minimum(context * share // tl.maximum(total, 1), tl.cdiv(context, PART))
    return tl.maximum(parts, 1).to(tl.int32)


@triton.jit(do_not_specialize=["first_seq", "end_seq", "num_items", "share"])
def plan_kernel(
    plan,  # [num_items, 4] int32
    cu_seqlens_q,
    context_lens,
    first_seq,
    end_seq,
    num_items,
    share,
    TOKENS: tl.constexpr,
    PART: tl.constexpr,
    SEQS: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Program i plans ITEMS programs of the attention: item p is (sequence, its tile of queries,
    part, number of parts). Contexts in parts come first, since these take the longest. Without
    work, the number of parts is 0.
    """
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    i = tl.arange(0, SEQS)
    total = tl.zeros((), tl.int64)  # keys that all tiles read
    for begin in range(first_seq, end_seq, SEQS):
        tiles, context = work_of_seqs(cu_seqlens_q, context_lens, begin + i, end_seq, TOKENS)
        total += tl.sum(tiles * context, 0)
    cut = 0  # items of the sequences so far, with contexts in parts
    whole = 0  # ... and without; they come behind all with parts
    for begin in range(first_seq, end_seq, SEQS):
        tiles, context = work_of_seqs(cu_seqlens_q, context_lens, begin + i, end_seq, TOKENS)
        parts = parts_of(context, total, share, PART)
        whole += tl.sum(tl.where(parts > 1, tiles * parts, 0), 0)
    seq = tl.zeros([ITEMS], tl.int32)
    within = tl.zeros([ITEMS], tl.int32)
    num_parts = tl.zeros([ITEMS], tl.int32)
    for begin in range(first_seq, end_seq, SEQS):
        tiles, context = work_of_seqs(cu_seqlens_q, context_lens, begin + i, end_seq, TOKENS)
        parts = parts_of(context, total, share, PART)
        in_parts = tl.where(parts > 1, tiles * parts, 0)
        in_one = tl.where(parts > 1, 0, tiles)
        first = tl.where(
            parts > 1,
            cut + tl.cumsum(in_parts, 0) - in_parts,
            whole + tl.cumsum(in_one, 0) - in_one,
        )
        cut += tl.sum(in_parts, 0)
        whole += tl.sum(in_one, 0)
        place = item[:, None] - first[None, :]
        is_mine = (place >= 0) & (place < (in_parts + in_one)[None, :])
        seq += tl.sum(tl.where(is_mine, (begin + i)[None, :], 0), 1)
        within += tl.sum(tl.where(is_mine, place, 0), 1)
        num_parts += tl.sum(tl.where(is_mine, parts[None, :], 0), 1)
    is_item = item < num_items
    at = plan + 4 * item
    tl.store(at, seq, mask=is_item)
    tl.store(at + 1, within // tl.maximum(num_parts, 1), mask=is_item)
    tl.store(at + 2, within % tl.maximum(num_parts, 1), mask=is_item)
    tl.store(at + 3, num_parts, mask=is_item)


@triton.jit
def item_of(plan, item):
    """A sequence, its tile of queries, a part of its context, and how many parts there are."""
    at = plan + 4 * item
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


class Tile(NamedTuple):
    """The work of a program: some tokens of one sequence, and how many keys at a time."""

    tokens: int
    rows: int  # tokens times query heads of a KV head, padded
    keys: int


class Work(NamedTuple):
    """The programs that compute the decodes of a step, or its chunks."""

    tile: Tile
    part: int  # the fewest keys of a part
    share: int  # programs of a KV head that contexts in parts may have
    plan: Tensor  # see plan_kernel


def tile_sizes(
    dim: int, group: int, itemsize: int, is_short: bool, is_int8: bool, is_old: bool = False
) -> Tile:
    """Tile sizes so small that no registers spill, with two buffers for keys and values.

    With two buffers, a tile is loaded while the previous one is computed. Decodes and other
    sequences of a few tokens have the smallest tiles of queries. See tests/core/test_kernels.py.
    """
    num_bytes = 16384 if is_short and itemsize == 2 and not is_int8 else 8192
    keys = max(16, min(64, num_bytes // (dim * itemsize)))
    if is_old:  # before sm_80: a tile of half precision takes more registers
        keys = 16
    padded_group = triton.next_power_of_2(group)
    rows = 64 if dim <= 128 else 32
    if itemsize == 4 or is_old:
        rows = 16
    rows = max(rows, 2 * padded_group)  # at least two tokens
    if is_short:
        rows = short_rows(group)
    return Tile(rows // group, rows, keys)


def short_rows(group: int) -> int:
    """The fewest rows of a tile: tl.dot wants 16, and a token has `group` of them."""
    return max(16, triton.next_power_of_2(group))


def share_of(num_kv_heads: int, device: torch.device) -> int:
    """Programs of a KV head that keep all multiprocessors busy."""
    if device.type != "cuda":
        return 1
    num_programs = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, num_programs // num_kv_heads)


def layout(batch: Batch) -> dict[int, Work]:
    """Nothing yet: the first layer adds the work, since it knows the number of query heads."""
    return {}


def work_of(q: Tensor, batch: Batch, first_seq: int, num_seqs: int) -> Work:
    """The programs for all decodes of a batch, or for all of its chunks, which come after the
    decodes. The device plans them: only it need know the lengths."""
    works: Any = batch.layout
    if first_seq in works:
        return works[first_seq]
    num_tokens, heads, head_dim = q.shape
    cache = batch.kv_cache
    group = heads // cache.num_kv_heads
    num_tokens = num_seqs if first_seq < batch.num_decodes else num_tokens - batch.num_decodes
    is_short = num_tokens <= num_seqs * (short_rows(group) // group)
    is_old = q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0)
    dim = triton.next_power_of_2(head_dim)
    tile = tile_sizes(dim, group, q.element_size(), is_short, cache.head_dim > head_dim, is_old)
    part = PART * max(1, tile.rows // 16)  # more queries have more results to combine
    share = share_of(cache.num_kv_heads, q.device)
    # each sequence may have a tile that is not full; all tiles in parts have `share` in all
    num_items = num_seqs + share - 1
    if first_seq == batch.num_decodes:
        num_items += num_tokens // tile.tokens
    plan = torch.empty(num_items, 4, dtype=torch.int32, device=q.device)
    plan_kernel[(triton.cdiv(num_items, 32),)](
        plan, batch.cu_seqlens_q, batch.context_lens, first_seq, first_seq + num_seqs, num_items,
        share, tile.tokens, part, 64, 32,
    )  # fmt: skip
    works[first_seq] = Work(tile, part, share, plan)
    return works[first_seq]
