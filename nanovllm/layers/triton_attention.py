"""Attention in Triton: attention.py for a GPU (or, slowly, for a CPU with TRITON_INTERPRET=1).

One kernel handles prompts, chunks after a cached prefix, and decodes. A program holds a tile of
queries: a few tokens of one sequence, times the query heads that share a KV head, so that each key
is read once for all of them. It goes through the context in tiles of keys, independent of the block
size: each key's slot is looked up in the block table. Softmax is online (Milakov and Gimelshein,
2018), in powers of two, with the scale folded in.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.triton_int8 import scales_of

PART = 64  # tokens of a context that are worth a program of their own
MAX_SPLITS = 32  # a power of two
PROGRAMS = 4  # for each multiprocessor: enough without parts
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
def tile_of(cu_seqlens_q, tile, num_seqs, TOKENS: tl.constexpr):
    """The sequence that a tile of queries belongs to, and the tile's first token in it.

    With TOKENS == 1, all sequences have one token, and a tile is a sequence. Otherwise the tiles of
    sequence b, with `tokens` tokens before it, start at tokens // TOKENS + b, found by binary
    search. This leaves room for one partly filled tile per sequence, so the grid depends only on
    the numbers of tokens and sequences, not on lengths.
    """
    if TOKENS == 1:
        return tile, 0
    low = 0
    high = num_seqs
    first = tl.load(cu_seqlens_q)
    while low < high:
        middle = (low + high) // 2
        tokens_before = tl.load(cu_seqlens_q + middle) - first
        if tokens_before // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    tokens_before = tl.load(cu_seqlens_q + seq) - first
    first_tile = tokens_before // TOKENS + seq
    return seq, (tile - first_tile) * TOKENS


# each value of these would be compiled for
@triton.jit(do_not_specialize=["first_seq", "num_seqs", "num_splits"])
def attention_kernel(
    out, maxima, sums,
    q, k_cache, v_cache,
    cu_seqlens_q, context_lens, cu_blocks, block_tables,
    scale, q_stride, first_seq, num_seqs, num_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    PART: tl.constexpr, IS_SPLIT: tl.constexpr, KV_DIM: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv_head, split): TOKENS tokens x query heads, over one part of the context.

    For `num_seqs` sequences, starting with `first_seq`. A part has at least PART tokens.

    ROWS >= TOKENS * HEADS / KV_HEADS and DIM >= HEAD_DIM are padded to powers of two. A key in the
    cache has KV_DIM numbers: HEAD_DIM, and with int8 the four bytes of its scale behind them. With
    IS_SPLIT, the result is not normalized: `out` is [T, HEADS, num_splits, HEAD_DIM] fp32, and
    `maxima` and `sums` are those of each part.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    seq, first = tile_of(cu_seqlens_q + first_seq, tile, num_seqs, TOKENS)
    seq += first_seq
    start = tl.load(cu_seqlens_q + seq)
    end = tl.load(cu_seqlens_q + seq + 1)
    context = tl.load(context_lens + seq)
    if first < end - start and context > 0:
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

        # the keys: this split's part of what the tile's last token may see
        position = context - (end - start) + token
        visible = tl.minimum(context - (end - start) + first + TOKENS, context)
        part = tl.maximum(tl.cdiv(visible, num_splits), PART)
        part = tl.cdiv(part, KEYS) * KEYS
        first_key = split * part
        end_key = tl.minimum(split * part + part, visible)

        # blocks are looked up one tile ahead: a load whose address must be loaded first would leave
        # nothing to overlap with
        table = block_tables + tl.load(cu_blocks + seq)
        at = first_key + key
        block = tl.load(table + at // BLOCK_SIZE, mask=at < end_key, other=0)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, DIM], tl.float32)
        for begin in range(first_key, end_key, KEYS):
            at = begin + key
            is_key = at < visible
            slot = block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE
            kv_at = (slot * KV_HEADS + kv_head) * KV_DIM
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

        row_at = (index * HEADS + head) * num_splits + split
        if IS_SPLIT:
            tl.store(maxima + row_at, maximum, mask=is_row)
            tl.store(sums + row_at, total, mask=is_row)
        else:
            result = result / total[:, None]
        if first_key < end_key:  # a part without keys has nothing to add
            out_at = out + row_at[:, None] * HEAD_DIM + dim
            tl.store(out_at, result, mask=is_row[:, None] & is_dim)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    out,
    parts,
    maxima,
    sums,
    context_lens,
    num_splits,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,  # >= num_splits
):
    """Program (t, head): combines the parts of one decoded token's context."""
    t = tl.program_id(0).to(tl.int64)
    heads = tl.num_programs(1)
    if tl.load(context_lens + t) > 0:
        row = t * heads + tl.program_id(1)
        dim = tl.arange(0, DIM)
        is_dim = dim < HEAD_DIM
        split = tl.arange(0, SPLITS)
        is_split = split < num_splits
        split_at = row * num_splits + split
        maximum = tl.load(maxima + split_at, mask=is_split, other=float("-inf"))
        weight = tl.exp2(maximum - tl.max(maximum, 0))  # 0 for a part without keys
        part_at = parts + split_at[:, None] * HEAD_DIM + dim
        part = tl.load(part_at, mask=(weight[:, None] > 0) & is_dim, other=0.0)
        total = tl.sum(tl.load(sums + split_at, mask=is_split, other=0.0) * weight, 0)
        result = tl.sum(part * weight[:, None], 0) / total
        tl.store(out + row * HEAD_DIM + dim, result, mask=is_dim)


def copy_blocks(kv_cache: KVCache, copies: list[tuple[int, int]]) -> None:
    blocks = kv_cache.tensor
    pairs = torch.tensor(copies, device=blocks.device)
    num_pieces = blocks.shape[:2].numel()  # per block: the keys and the values of each layer
    size = blocks[0, 0, 0].numel()
    part = min(2048, triton.next_power_of_2(size))
    grid = (len(pairs), num_pieces, triton.cdiv(size, part))
    copy_blocks_kernel[grid](blocks, pairs, kv_cache.num_blocks, size, part)


class Tile(NamedTuple):
    """The work of a program: some tokens of one sequence, and how many keys at a time."""

    tokens: int
    rows: int  # tokens times query heads of a KV head, padded
    keys: int
    warps: int = 4
    stages: int = 3


def tile_sizes(
    dim: int, group: int, itemsize: int, is_decode: bool, is_whole: bool, is_old: bool = False
) -> Tile:
    """Tile sizes so small that no registers spill, with two buffers for keys and values.

    With two buffers, a tile is loaded while the previous one is computed. A decode whose context is
    whole, not cut into parts, goes through many: its tiles are larger. See
    tests/core/test_kernels.py.
    """
    num_bytes = 16384 if is_decode and is_whole and itemsize == 2 else 8192
    keys = max(16, min(64, num_bytes // (dim * itemsize)))
    if is_old:  # before sm_80: a tile of half precision takes more registers
        keys = 16
    padded_group = triton.next_power_of_2(group)
    if is_decode:
        return Tile(1, max(16, padded_group), keys)
    rows = 64 if dim <= 128 else 32
    if itemsize == 4 or is_old:
        rows = 16
    rows = max(rows, 2 * padded_group)  # at least two tokens: one means a decode
    return Tile(rows // group, rows, keys)


def layout(batch: Batch) -> int:
    """The number of parts into which the context of each decode is cut."""
    programs = max(batch.num_decodes, 1) * batch.kv_cache.num_kv_heads
    return num_splits(programs, batch.max_context, batch.slot_mapping.device)


def num_splits(programs: int, max_context: int, device: torch.device) -> int:
    """Enough parts to keep all multiprocessors busy, but at most one per PART tokens.

    A context shorter than the longest has empty parts.
    """
    wanted = 1
    if device.type == "cuda":
        wanted = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(wanted // programs, triton.cdiv(max_context, PART), MAX_SPLITS))


def paged_attention(q: Tensor, batch: Batch, layer: int, scale: float) -> Tensor:
    """Computes attention.paged_attention, except for padding: sequences of context_lens 0.

    Decodes and chunks of prompts have tiles of different sizes, so a step with both launches the
    kernel twice.
    """
    splits = batch.layout
    assert isinstance(splits, int), "batch.layout must be what `layout` makes of this batch"
    out = torch.empty_like(q)
    num_decodes = batch.num_decodes
    num_chunks = len(batch.context_lens) - num_decodes
    if num_chunks:
        launch(out, out, out, q, batch, layer, scale, num_decodes, num_chunks, 1)
    if num_decodes and splits == 1:
        launch(out, out, out, q, batch, layer, scale, 0, num_decodes, 1)
    elif num_decodes:
        _, heads, head_dim = q.shape
        parts = q.new_empty(num_decodes, heads, splits, head_dim, dtype=torch.float32)
        maxima = parts.new_empty(num_decodes, heads, splits)
        sums = parts.new_empty(num_decodes, heads, splits)
        launch(parts, maxima, sums, q, batch, layer, scale, 0, num_decodes, splits)
        dim = triton.next_power_of_2(head_dim)
        combine_kernel[(num_decodes, heads)](
            out, parts, maxima, sums, batch.context_lens, splits, head_dim, dim, MAX_SPLITS
        )
    return out


def launch(
    out: Tensor, maxima: Tensor, sums: Tensor, q: Tensor, batch: Batch, layer: int, scale: float,
    first_seq: int, num_seqs: int, splits: int,
) -> None:  # fmt: skip
    """Launches the kernel for all decodes of a batch, or for all of its chunks, which come after
    the decodes."""
    num_tokens, heads, head_dim = q.shape
    cache = batch.kv_cache
    keys, values = cache.layers[layer]
    dim = triton.next_power_of_2(head_dim)
    is_decode = first_seq < batch.num_decodes
    is_old = q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0)
    group = heads // cache.num_kv_heads
    is_int8 = cache.head_dim > head_dim
    is_whole = splits == 1 and not is_int8
    tile = tile_sizes(dim, group, q.element_size(), is_decode, is_whole, is_old)
    num_tiles = num_seqs
    if not is_decode:  # see tile_of
        num_tiles += (num_tokens - batch.num_decodes) // tile.tokens
    attention_kernel[(num_tiles, cache.num_kv_heads, splits)](
        out, maxima, sums, q, keys, values,
        batch.cu_seqlens_q, batch.context_lens, batch.cu_blocks, batch.block_tables,
        scale * LOG2_E, q.stride(0), first_seq, num_seqs, splits,
        heads, cache.num_kv_heads, head_dim, cache.block_size,
        tile.tokens, tile.rows, tile.keys, dim, PART, splits > 1, cache.head_dim,
        # with 4 warps, the numbers made of int8 would not fit into the registers
        num_warps=8 if is_int8 else tile.warps, num_stages=tile.stages,
    )  # fmt: skip
