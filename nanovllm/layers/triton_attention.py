"""Attention in Triton: attention.py for a GPU (or, slowly, for a CPU with TRITON_INTERPRET=1).

One kernel handles prompts, chunks after a cached prefix, and decodes. A program holds a tile of
queries: a few tokens of one sequence, times the query heads that share a KV head, so that each key
is read once for all of them. It goes through the context in tiles of keys, independent of the block
size: each key's slot is looked up in the block table. Softmax is online (Milakov and Gimelshein,
2018), in powers of two, with the scale folded in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.triton_int8 import scales_of
from nanovllm.layers.triton_plan import Work, item_of, work_of
from nanovllm.layers.triton_plan import layout as layout

SPLITS = 32  # parts that are combined at a time: a power of two
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32
LOG2_E = 1.4426950408889634  # exp(x) is exp2(x * LOG2_E)


@triton.jit
def copy_blocks_kernel(cache, pairs, num_blocks, SIZE: tl.constexpr, PART: tl.constexpr):
    """Program (c, l, part) does part of copy c, of SIZE numbers, in one layer's keys or values."""
    pair = pairs + 2 * tl.program_id(0)
    source = tl.load(pair)
    target = tl.load(pair + 1)
    cache += tl.program_id(1).to(tl.int64) * num_blocks * SIZE
    i = tl.program_id(2) * PART + tl.arange(0, PART)
    block = tl.load(cache + source * SIZE + i, mask=i < SIZE)
    tl.store(cache + target * SIZE + i, block, mask=i < SIZE)


@triton.jit
def attention_kernel(
    out,
    parts,
    maxima,
    sums,
    plan,
    q,
    k_cache,
    v_cache,
    cu_seqlens_q,
    context_lens,
    cu_blocks,
    block_tables,
    scale,
    q_stride,
    slot_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_DIM: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Program (item, kv_head): TOKENS tokens x query heads, over the part of the context that the
    plan says. A part has at least PART tokens.

    ROWS >= TOKENS * HEADS / KV_HEADS and DIM >= HEAD_DIM are padded to powers of two. A key in the
    cache has KV_DIM numbers: HEAD_DIM, and with int8 the four bytes of its scale behind them. One
    of several parts is not normalized: `parts` is [item, TOKENS, HEADS, HEAD_DIM] fp32, and
    `maxima` and `sums` are those of each part.
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    seq, tile, split, num_parts = item_of(plan, item)
    if num_parts > 0:
        first = tile * TOKENS
        start = tl.load(cu_seqlens_q + seq)
        end = tl.load(cu_seqlens_q + seq + 1)
        context = tl.load(context_lens + seq)

        # the queries: a row is a token and a head
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, DIM)
        key = tl.arange(0, KEYS)
        token = first + row // GROUP
        head = kv_head * GROUP + row % GROUP
        is_row = (row < TOKENS * GROUP) & (token < end - start)
        is_dim = dim < HEAD_DIM
        index = (start + token).to(tl.int64)
        q_at = index * q_stride + head * HEAD_DIM
        queries = tl.load(q + q_at[:, None] + dim, mask=is_row[:, None] & is_dim, other=0.0)

        # the keys: this part of what the tile's last token may see
        position = context - (end - start) + token
        visible = tl.minimum(context - (end - start) + first + TOKENS, context)
        part = tl.maximum(tl.cdiv(visible, num_parts), PART)
        part = tl.cdiv(part, KEYS) * KEYS
        first_key = split * part
        end_key = tl.minimum(split * part + part, visible)

        # blocks are looked up one tile ahead: a load whose address must be loaded first would leave
        # nothing to overlap with
        table = block_tables + tl.load(cu_blocks + seq)
        at = first_key + key
        block = tl.load(table + at // BLOCK_SIZE, mask=at < end_key, other=0)
        # not -inf: a token may see no key of a part, and -inf - (-inf) is NaN
        maximum = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, DIM], tl.float32)
        for begin in range(first_key, end_key, KEYS):
            at = begin + key
            is_key = at < visible
            slot = block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE
            kv_at = slot * slot_stride + kv_head * KV_DIM
            after = at + KEYS
            block = tl.load(table + after // BLOCK_SIZE, mask=after < end_key, other=0)

            k_at = k_cache + kv_at[None, :] + dim[:, None]
            keys = tl.load(k_at, mask=is_key & is_dim[:, None], other=0.0)
            scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * scale
            if KV_DIM > HEAD_DIM:
                scores *= scales_of(k_cache + kv_at, is_key, HEAD_DIM)
            is_visible = at[None, :] <= position[:, None]
            scores = tl.where(is_visible, scores, float("-inf"))

            # what was summed up so far shrinks if a larger score has come
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            weights = tl.exp2(scores - new_maximum[:, None])
            shrink = tl.exp2(maximum - new_maximum)
            maximum = new_maximum
            total = total * shrink + tl.sum(weights, 1)
            v_at = v_cache + kv_at[:, None] + dim
            values = tl.load(v_at, mask=is_key[:, None] & is_dim, other=0.0)
            result = result * shrink[:, None]
            if KV_DIM > HEAD_DIM:
                values *= scales_of(v_cache + kv_at, is_key, HEAD_DIM)[:, None]
            weights = weights.to(queries.dtype)
            result += tl.dot(weights, values.to(queries.dtype), input_precision="ieee")

        if num_parts > 1:
            row_at = ((item * TOKENS + row // GROUP) * HEADS + head).to(tl.int64)
            tl.store(maxima + row_at, maximum, mask=is_row)
            tl.store(sums + row_at, total, mask=is_row)
            if first_key < end_key:  # a part without keys has nothing to add
                part_at = parts + row_at[:, None] * HEAD_DIM + dim
                tl.store(part_at, result, mask=is_row[:, None] & is_dim)
        else:
            out_at = out + (index * HEADS + head)[:, None] * HEAD_DIM + dim
            tl.store(out_at, result / total[:, None], mask=is_row[:, None] & is_dim)


@triton.jit
def combine_kernel(
    out,
    parts,
    maxima,
    sums,
    plan,
    cu_seqlens_q,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,  # parts at a time
):
    """Program (item, head): combines the parts of some tokens of a tile. Its programs share them:
    with three parts, the one of part 0 takes tokens 0, 3, ..."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    seq, tile, split, num_parts = item_of(plan, item)
    if num_parts > 1:
        start = tl.load(cu_seqlens_q + seq) + tile * TOKENS
        num_tokens = tl.minimum(tl.load(cu_seqlens_q + seq + 1) - start, TOKENS)
        dim = tl.arange(0, DIM)
        is_dim = dim < HEAD_DIM
        for token in range(split, num_tokens, num_parts):
            highest = tl.full((), LOWEST, tl.float32)
            total = 0.0
            result = tl.zeros([DIM], tl.float32)
            for begin in range(0, num_parts, SPLITS):
                part = begin + tl.arange(0, SPLITS)
                is_part = part < num_parts
                row = (((item - split + part) * TOKENS + token) * heads + head).to(tl.int64)
                maximum = tl.load(maxima + row, mask=is_part, other=LOWEST)
                new_highest = tl.maximum(highest, tl.max(maximum, 0))
                weight = tl.exp2(maximum - new_highest)  # 0 for a part without keys
                shrink = tl.exp2(highest - new_highest)
                highest = new_highest
                in_part = tl.load(sums + row, mask=is_part, other=0.0)
                total = total * shrink + tl.sum(in_part * weight, 0)
                is_read = (is_part & (in_part > 0))[:, None] & is_dim
                numbers = tl.load(parts + row[:, None] * HEAD_DIM + dim, mask=is_read, other=0.0)
                result = result * shrink + tl.sum(numbers * weight[:, None], 0)
            out_at = ((start + token).to(tl.int64) * heads + head) * HEAD_DIM + dim
            tl.store(out + out_at, result / total, mask=is_dim)


def copy_blocks(kv_cache: KVCache, copies: Tensor) -> None:
    blocks = kv_cache.tensor
    num_pieces = blocks.shape[:2].numel()  # per block: the keys and the values of each layer
    size = blocks[0, 0, 0].numel()
    part = min(2048, triton.next_power_of_2(size))
    grid = (len(copies), num_pieces, triton.cdiv(size, part))
    copy_blocks_kernel[grid](blocks, copies, kv_cache.num_blocks, size, part)


def paged_attention(q: Tensor, batch: Batch, layer: int, scale: float) -> Tensor:
    """Computes attention.paged_attention, except for padding: sequences of context_lens 0.

    Decodes and chunks of prompts have tiles of different sizes, so a step with both launches the
    kernels twice.
    """
    out = torch.empty_like(q)
    num_decodes = batch.num_decodes
    num_chunks = len(batch.context_lens) - num_decodes
    for first_seq, num_seqs in ((0, num_decodes), (num_decodes, num_chunks)):
        if num_seqs:
            mine = work_of(q, batch, first_seq, num_seqs)
            parts = launch(out, q, batch, layer, scale, mine)
            combine(out, parts, batch, mine)
    return out


def launch(
    out: Tensor, q: Tensor, batch: Batch, layer: int, scale: float, work: Work
) -> tuple[Tensor, ...]:
    """Returns the results of contexts in parts, their maxima and their sums."""
    _, heads, head_dim = q.shape
    cache = batch.kv_cache
    keys, values = cache.layers[layer]
    tile = work.tile
    num_parts = work.share if work.share > 1 else 0
    sums = q.new_empty(num_parts, tile.tokens, heads, dtype=torch.float32)
    maxima = torch.empty_like(sums)
    parts = sums.new_empty(*sums.shape, head_dim)
    attention_kernel[(len(work.plan), cache.num_kv_heads)](
        out, parts, maxima, sums, work.plan, q, keys, values,
        batch.cu_seqlens_q, batch.context_lens, batch.cu_blocks, batch.block_tables,
        scale * LOG2_E, q.stride(0), keys.stride(1),
        heads, cache.num_kv_heads,
        head_dim, triton.next_power_of_2(head_dim),
        cache.block_size, cache.head_dim,
        tile.tokens, tile.rows, tile.keys, work.part,
        # with 4 warps, the numbers made of int8 would not fit into the registers
        num_warps=8 if cache.head_dim > head_dim else 4, num_stages=3,
    )  # fmt: skip
    return parts, maxima, sums


def combine(out: Tensor, parts: tuple[Tensor, ...], batch: Batch, work: Work) -> None:
    """Combines contexts in parts, if there may be any."""
    _, heads, head_dim = out.shape
    dim = triton.next_power_of_2(head_dim)
    arguments = (out, *parts, work.plan, batch.cu_seqlens_q)
    if work.share > 1:
        combine_kernel[(work.share, heads)](*arguments, head_dim, dim, work.tile.tokens, SPLITS)
