"""`bench.py attention`: attention alone, ours against PyTorch's, over so many layers that no cache
holds their keys."""

import inspect
from contextlib import suppress
from functools import cache, partial
from typing import NamedTuple

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from nanovllm.layers import torch_ops
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.simulator.cost_model import Hardware, Work, visible_keys
from tutorials.machine import (
    device_name,
    environment,
    installed,
    seconds_of,
    this_machine,
)
from tutorials.report import ceiling_text, percentile, table


class Case(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    queries: int  # new tokens of each sequence
    context: int  # its tokens in the cache, these included


def attention_cases(is_cuda: bool) -> list[Case]:
    """Decodes, prompts, and chunks over a cached prefix, with the heads of Qwen3-0.6B and 8B."""
    contexts, batches, heads = (256, 1024), (1, 4, 16), [(16, 8, 128)]
    lengths = [(1, 256, 256), (1, 1024, 1024), (1, 128, 1024)]
    if is_cuda:
        contexts = (1024, 4096, 32768)
        batches = (1, 4, 16, 64, 256)
        heads = [(16, 8, 128), (32, 8, 128)]
        lengths = [
            (1, 1024, 1024),
            (1, 4096, 4096),
            (1, 16384, 16384),
            (1, 1024, 16384),
            (8, 512, 4096),
        ]
    decodes = [(batch, 1, context) for context in contexts for batch in batches]
    return [Case(*h, *three) for h in heads for three in decodes + lengths]


def attention_case(case: Case, device, dtype, hardware: Hardware, block_size: int = 16) -> dict:
    """Seconds per call, ours and PyTorch's, over so many layers that no cache holds all their keys
    and values."""
    heads, kv_heads, head_dim, batch, queries, context = case
    row, is_cuda, width = case._asdict(), device.type == "cuda", -(-context // block_size)
    kv_bytes = 2 * batch * context * kv_heads * head_dim * dtype.itemsize
    layers = max(1, min(64, 2 ** (28 if is_cuda else 26) // kv_bytes))
    if is_cuda and 2.5 * kv_bytes * layers > torch.cuda.mem_get_info()[0]:  # SDPA needs a copy
        return row | {
            "skipped": f"{2 * kv_bytes * layers / 2**30:.0f} GiB of keys and values do not fit"
        }
    shape = (2, layers, batch * width, block_size, kv_heads, head_dim)
    steps = Batch(
        kv_cache=KVCache(torch.empty(shape, dtype=dtype, device=device).normal_()),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),  # nothing is stored
        cu_seqlens_q=torch.arange(
            0, (batch + 1) * queries, queries, dtype=torch.int32, device=device
        ),
        context_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        cu_blocks=torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=device),
        block_tables=torch.randperm(batch * width, device=device).int(),
        num_decodes=batch if queries == 1 else 0,
        max_context=context,
    )
    q = torch.randn(batch * queries, heads, head_dim, dtype=dtype, device=device)
    ops = torch_ops
    if is_cuda:
        from nanovllm.layers import triton_ops as ops
    steps.layout = ops.layout(steps)
    ours = partial(ops.paged_attention, q, steps, scale=head_dim**-0.5)
    row["torch_function"], theirs = pytorch_attention(case, q, steps)
    row["max_difference"] = (ours(layer=0).float() - theirs(layer=0).float()).abs().max().item()
    size = kv_bytes + 2 * q.numel() * dtype.itemsize
    flops = 4 * heads * head_dim * batch * visible_keys(queries, context)
    floor = hardware.floor(Work(0, size, flops))
    for name, call in (("", ours), ("torch_", theirs)):
        seconds = seconds_per_layer(call, layers, device)
        row |= {f"{name}seconds": seconds, f"{name}floor_share": floor / seconds}
    return row | {
        "bytes_per_second": size / row["seconds"],
        "flops_per_second": flops / row["seconds"],
    }


def pytorch_attention(case: Case, q, steps):
    """(name, function of a layer): varlen_attn through the block table where that runs, else SDPA
    on a copy."""
    heads, kv_heads, head_dim, batch, queries, context = case

    @cache
    def copied(layer: int):
        blocks = steps.kv_cache.tensor[:, layer].index_select(1, steps.block_tables.flatten())
        return blocks.view(2, batch, -1, kv_heads, head_dim).transpose(2, 3).contiguous()

    def sdpa(layer: int):
        mask = causal_lower_right(queries, context) if 1 < queries < context else None
        rows = q.view(batch, queries, heads, head_dim).transpose(1, 2)
        options = dict(attn_mask=mask, is_causal=queries == context, enable_gqa=True)
        return (
            scaled_dot_product_attention(rows, *copied(layer), **options)
            .transpose(1, 2)
            .reshape(q.shape)
        )

    def varlen(layer: int):
        paging = dict(seqused_k=steps.context_lens, block_table=steps.block_tables.view(batch, -1))
        options = dict(window_size=(-1, 0), enable_gqa=True, **paging)
        return varlen_attn(
            q, *steps.kv_cache.layers[layer], steps.cu_seqlens_q, None, queries, context, **options
        )

    # not on every device, nor with every block size
    with suppress(ImportError, RuntimeError, ValueError):
        from torch.nn.attention.varlen import varlen_attn

        if "block_table" in inspect.signature(varlen_attn).parameters:
            varlen(layer=0)
            return "varlen_attn", varlen
    return "SDPA", sdpa


def seconds_per_layer(call, layers: int, device) -> float:
    """Median of a few sweeps over all layers; on CUDA as a graph, or we would time Python's
    launches."""

    def sweep():
        for layer in range(layers):
            call(layer=layer)

    sweep()
    if device.type != "cuda":
        return percentile([seconds_of(sweep, device) / layers for _ in range(5)], 50)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sweep()
    graph.replay()
    return percentile([seconds_of(graph.replay, device) / layers for _ in range(20)], 50)


def measure(args) -> dict:
    """`bench.py attention`: prints a line for each case, and returns the report."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_cuda = device.type == "cuda"
    dtype = getattr(
        torch, args.dtype if args.dtype != "auto" else "bfloat16" if is_cuda else "float32"
    )
    report = environment() | {
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
    }
    report["versions"] = {name: installed(name) for name in ("torch", "triton")}
    hardware = this_machine(device, dtype)
    report["ceilings"], report["attention"] = hardware._asdict(), []
    print(f"{report['device']}, {report['dtype']}, with {ceiling_text(report['ceilings'])}:\n")
    with torch.inference_mode():
        for case in attention_cases(is_cuda):
            report["attention"].append(attention_case(case, device, dtype, hardware))
            torch.cuda.empty_cache()
    columns = [(key, "") for key in Case._fields] + [
        ("seconds", ",.1f", 1e6),
        ("bytes_per_second", ",.1f", 1e-9),
    ]
    columns += [("flops_per_second", ",.3f", 1e-12), ("floor_share", ".0%"), ("torch_function", "")]
    columns += [
        ("torch_seconds", ",.1f", 1e6),
        ("torch_floor_share", ".0%"),
        ("max_difference", ".1e"),
    ]
    header = "|heads|KV|dim|batch|new|context|µs|GB/s|TFLOP/s|ceiling|PyTorch|µs|ceiling|difference"
    print(table(header, columns, {str(i): row for i, row in enumerate(report["attention"], 1)}))
    for i, row in enumerate(report["attention"], 1):
        if "skipped" in row:
            print(f"{i}: {row['skipped']}")
    return report
