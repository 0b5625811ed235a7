"""Attention in Triton: attention.py for a GPU (or, slowly, for a CPU with TRITON_INTERPRET=1).

One kernel handles prompts, chunks after a cached prefix, and decodes. A program holds a tile of queries: a few tokens
of one sequence, times the query heads that share a KV head, so that each key is read once for all of them. It goes
through the context in tiles of keys, independent of the block size: each key's slot is looked up in the block table.
Softmax is online (Milakov and Gimelshein, 2018), in powers of two, with the scale folded in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers.batch import Batch

PART = 256  # tokens of a context that are worth a program of their own


@triton.jit
def store_kv_kernel(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    """Program t copies the key and value of token t, WIDTH = num_kv_heads * head_dim numbers each, into its slot."""
    t, i = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    slot = tl.load(slots + t).to(tl.int64)
    if slot >= 0:  # a padding row of a CUDA graph has none
        tl.store(
            k_cache + slot * WIDTH + i,
            tl.load(k + t * k_stride + i, mask=i < WIDTH),
            mask=i < WIDTH,
        )
        tl.store(
            v_cache + slot * WIDTH + i,
            tl.load(v + t * v_stride + i, mask=i < WIDTH),
            mask=i < WIDTH,
        )


@triton.jit
def copy_blocks_kernel(cache, pairs, num_blocks, SIZE: tl.constexpr, PART: tl.constexpr):
    """Program (c, l, part) does part of copy c, of SIZE numbers, in the keys or values of one layer."""
    source, target = (
        tl.load(pairs + 2 * tl.program_id(0)),
        tl.load(pairs + 2 * tl.program_id(0) + 1),
    )
    cache += tl.program_id(1).to(tl.int64) * num_blocks * SIZE
    i = tl.program_id(2) * PART + tl.arange(0, PART)
    tl.store(
        cache + target * SIZE + i, tl.load(cache + source * SIZE + i, mask=i < SIZE), mask=i < SIZE
    )


@triton.jit
def tile_of(cu_seqlens_q, tile, num_seqs, TOKENS: tl.constexpr):
    """The sequence that a tile of queries belongs to, and the tile's first token in it.

    With TOKENS == 1, all sequences have one token, and a tile is a sequence. Otherwise the tiles of sequence b, with so
    many tokens before it, start at tokens // TOKENS + b, found by binary search. This leaves room for one partly filled
    tile per sequence, so the grid depends only on the numbers of tokens and sequences, not on lengths.
    """
    if TOKENS == 1:
        return tile, 0
    low, high, first = 0, num_seqs, tl.load(cu_seqlens_q)
    while low < high:
        middle = (low + high) // 2
        if (tl.load(cu_seqlens_q + middle) - first) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    return seq, (tile - ((tl.load(cu_seqlens_q + seq) - first) // TOKENS + seq)) * TOKENS


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs"]
)  # otherwise new values would cause a recompilation
def attention_kernel(
    out, maxima, sums, q, k_cache, v_cache, cu_seqlens_q, context_lens, cu_blocks, block_tables,
    scale, q_stride, first_seq, num_seqs,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    SPLITS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv_head, split): a tile of TOKENS tokens x query heads, over one part of the context, which has at
    least PART tokens. For `num_seqs` sequences, starting with `first_seq`.

    ROWS >= TOKENS * HEADS / KV_HEADS and DIM >= HEAD_DIM are padded to powers of two. With SPLITS > 1, the result is
    not normalized: `out` is [T, HEADS, SPLITS, HEAD_DIM] fp32, and `maxima` and `sums` are those of each part.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    seq, first = tile_of(cu_seqlens_q + first_seq, tile, num_seqs, TOKENS)
    seq += first_seq
    start, end = tl.load(cu_seqlens_q + seq), tl.load(cu_seqlens_q + seq + 1)
    context = tl.load(context_lens + seq)
    if first < end - start and context > 0:
        row, dim, key = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, KEYS)
        token, head = first + row // GROUP, kv_head * GROUP + row % GROUP
        is_row = (row < TOKENS * GROUP) & (token < end - start)
        is_dim = dim < HEAD_DIM
        index = (start + token).to(tl.int64)
        q_at = index * q_stride + head * HEAD_DIM
        queries = tl.load(q + q_at[:, None] + dim, mask=is_row[:, None] & is_dim, other=0.0)

        position = context - (end - start) + token
        visible = tl.minimum(
            context - (end - start) + first + TOKENS, context
        )  # to the tile's last token
        part = tl.cdiv(tl.maximum(tl.cdiv(visible, SPLITS), PART), KEYS) * KEYS
        first_key, end_key = split * part, tl.minimum(split * part + part, visible)
        table = block_tables + tl.load(cu_blocks + seq)
        # looked up one tile ahead: a load whose address must be loaded first would leave nothing to overlap with
        block = tl.load(
            table + (first_key + key) // BLOCK_SIZE, mask=first_key + key < end_key, other=0
        )
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, DIM], tl.float32)
        for begin in range(first_key, end_key, KEYS):
            at = begin + key
            is_key = at < visible
            slot = block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE
            block = tl.load(table + (at + KEYS) // BLOCK_SIZE, mask=at + KEYS < end_key, other=0)
            kv_at = (slot * KV_HEADS + kv_head) * HEAD_DIM
            keys = tl.load(
                k_cache + kv_at[None, :] + dim[:, None], mask=is_key & is_dim[:, None], other=0.0
            )
            scores = tl.dot(queries, keys, input_precision="ieee") * scale
            scores = tl.where(at[None, :] <= position[:, None], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            weights = tl.exp2(scores - new_maximum[:, None])
            shrink = tl.exp2(maximum - new_maximum)
            total = total * shrink + tl.sum(weights, 1)
            values = tl.load(
                v_cache + kv_at[:, None] + dim, mask=is_key[:, None] & is_dim, other=0.0
            )
            result = result * shrink[:, None] + tl.dot(
                weights.to(values.dtype), values, input_precision="ieee"
            )
            maximum = new_maximum

        row_at = (index * HEADS + head) * SPLITS + split
        if SPLITS == 1:
            result = result / total[:, None]
        else:
            tl.store(maxima + row_at, maximum, mask=is_row)
            tl.store(sums + row_at, total, mask=is_row)
        if first_key < end_key:  # a part without keys has nothing to add
            tl.store(out + row_at[:, None] * HEAD_DIM + dim, result, mask=is_row[:, None] & is_dim)


@triton.jit
def combine_kernel(
    out,
    parts,
    maxima,
    sums,
    context_lens,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (t, head): combines the parts of one decoded token's context."""
    t, heads = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    if tl.load(context_lens + t) > 0:
        row = t * heads + tl.program_id(1)
        split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
        maximum = tl.load(maxima + row * SPLITS + split)
        weight = tl.exp2(maximum - tl.max(maximum, 0))  # 0 for a part without keys
        at = (row * SPLITS + split)[:, None] * HEAD_DIM + dim
        part = tl.load(parts + at, mask=(weight[:, None] > 0) & (dim < HEAD_DIM), other=0.0)
        total = tl.sum(tl.load(sums + row * SPLITS + split) * weight, 0)
        tl.store(
            out + row * HEAD_DIM + dim,
            tl.sum(part * weight[:, None], 0) / total,
            mask=dim < HEAD_DIM,
        )


def store_kv(k: Tensor, v: Tensor, batch: Batch, layer: int) -> None:
    """A slot of -1 is not written."""
    width = k.shape[1] * k.shape[2]
    store_kv_kernel[(len(k),)](
        k, v, *batch.kv_cache[:, layer], batch.slot_mapping, k.stride(0), v.stride(0), width, triton.next_power_of_2(width)
    )  # fmt: skip


def copy_blocks(kv_cache: Tensor, copies: list[tuple[int, int]]) -> None:
    pairs = torch.tensor(copies, device=kv_cache.device)
    num_layers, num_blocks = kv_cache.shape[:2].numel(), kv_cache.shape[2]
    size = kv_cache[0, 0, 0].numel()
    part = min(2048, triton.next_power_of_2(size))
    copy_blocks_kernel[(len(pairs), num_layers, triton.cdiv(size, part))](
        kv_cache, pairs, num_blocks, size, part
    )


def tile_sizes(
    dim: int, group: int, itemsize: int, is_decode: bool
) -> tuple[int, int, int, int, int]:
    """(tokens, rows, keys, warps, stages) of a tile: so small that no registers spill, and with two buffers for keys and
    values, so that a tile is loaded while the previous one is computed. See tests/test_kernels.py."""
    keys = max(16, min(64, 8192 // (dim * itemsize)))
    if is_decode:
        return 1, max(16, triton.next_power_of_2(group)), keys, 4, 3
    rows = 16 if itemsize == 4 else 64 if dim <= 128 else 32
    rows = max(rows, 2 * triton.next_power_of_2(group))  # at least two tokens: one means a decode
    return rows // group, rows, keys, 4, 3


def num_splits(programs: int, max_context: int, device: torch.device) -> int:
    """Number of parts of a decode's context: enough to keep all multiprocessors busy to the end, although contexts
    differ, but at most one per PART tokens; a power of two. A context shorter than the longest has empty parts."""
    wanted = (
        16 * torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )
    return triton.next_power_of_2(
        min(triton.cdiv(wanted, programs), triton.cdiv(max_context, PART), 32)
    )


def paged_attention(
    q: Tensor, batch: Batch, layer: int, scale: float, splits: int = 0, part: int = PART
) -> Tensor:
    """Like attention.paged_attention; sequences with context_lens of 0 are padding and are not computed. Decodes and
    chunks of prompts have tiles of different sizes, so a step with both launches the kernel twice."""
    out, decodes, chunks = (
        torch.empty_like(q),
        batch.num_decodes,
        len(batch.context_lens) - batch.num_decodes,
    )
    (num_tokens, heads, head_dim), (block_size, kv_heads) = q.shape, batch.kv_cache.shape[3:5]
    dim, metadata = (
        triton.next_power_of_2(head_dim),
        (batch.cu_seqlens_q, batch.context_lens, batch.cu_blocks),
    )

    def launch(
        out: Tensor, maxima: Tensor, sums: Tensor, first_seq: int, num_seqs: int, splits: int
    ) -> None:
        is_decode = first_seq < decodes
        tokens, rows, keys, warps, stages = tile_sizes(
            dim, heads // kv_heads, q.element_size(), is_decode
        )
        num_tiles = num_seqs if is_decode else (num_tokens - decodes) // tokens + num_seqs
        attention_kernel[(num_tiles, kv_heads, splits)](
            out, maxima, sums, q, *batch.kv_cache[:, layer], *metadata, batch.block_tables,
            scale * 1.4426950408889634, q.stride(0), first_seq, num_seqs,  # exp(x) is exp2(x / ln 2)
            heads, kv_heads, head_dim, block_size, tokens, rows, keys, dim, splits, part,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    if chunks:
        launch(out, out, out, decodes, chunks, 1)
    splits = splits or num_splits(max(decodes, 1) * kv_heads, batch.max_context, q.device)
    if decodes and splits == 1:
        launch(out, out, out, 0, decodes, 1)
    elif decodes:
        parts = q.new_empty(decodes, heads, splits, head_dim, dtype=torch.float32)
        maxima, sums = (
            parts.new_empty(decodes, heads, splits),
            parts.new_empty(decodes, heads, splits),
        )
        launch(parts, maxima, sums, 0, decodes, splits)
        combine_kernel[(decodes, heads)](
            out, parts, maxima, sums, batch.context_lens, head_dim, dim, splits
        )
    return out
