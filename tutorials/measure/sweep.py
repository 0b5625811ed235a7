"""Attention of a decode at Qwen3-0.6B's shape, with other tiles and parts than the engine's.

    python -m tutorials.measure.sweep sweep.json             # without a GPU: add --small

Microseconds of a recorded step's 28 calls of `paged_attention`, with the second pass. `keys` are
those of a tile, `part` is PART, and `parts` the number of parts; null is the engine's own choice.
"""

import sys
from pathlib import Path
from unittest import mock

import torch

from nanovllm.layers import triton_attention as attention
from nanovllm.layers import triton_plan as plan
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from tutorials.machine import device_name, environment, installed, seconds_of
from tutorials.report import write_json

COLUMNS = ("sequences", "context", "keys", "part", "parts", "us")
PARTS = [(None, None), (64, None), (128, None), (None, 1)]
CHOICES = [(keys, *part) for keys in (32, 64) for part in PARTS]


def decodes(num_seqs: int, context: int, layers: int, dtype: torch.dtype) -> Batch:
    each = -(-context // 16)
    cache = KVCache(torch.randn(2, layers, num_seqs * each, 16, 8, 128, dtype=dtype))
    tables, ends = torch.randperm(num_seqs * each).int(), torch.arange(num_seqs + 1).int()
    lengths = torch.full((num_seqs,), context).int()
    return Batch(cache, lengths.long(), ends, lengths, ends * each, tables, num_seqs)


def microseconds(batch: Batch, keys: int, part: int | None, parts: int | None) -> float:
    own, cache = plan.tile_sizes, batch.kv_cache.tensor
    q = torch.randn(batch.num_decodes, 16, 128, dtype=cache.dtype)

    def step() -> None:
        for layer in range(cache.shape[1]):
            attention.paged_attention(q, batch, layer, 128**-0.5)

    other = {"tile_sizes": lambda *args: own(*args)._replace(keys=keys)}
    if parts is not None:
        other["share_of"] = lambda *args: parts * batch.num_decodes
    with mock.patch.multiple(plan, PART=part or plan.PART, **other):
        batch.layout = attention.layout(batch)
        step()  # compiles
        if q.is_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        return 1e6 * min(seconds_of(step, q.device) for _ in range(5))


def main(file: str, *small: str) -> None:
    device = torch.device("cpu" if small else "cuda")
    about = environment() | {name: installed(name) for name in ("torch", "triton")}
    about |= {"device": device_name(device), "rows": []}
    sizes = (1, torch.float32) if small else (28, torch.bfloat16)
    with device, torch.inference_mode():
        for case in [(2, 20)] if small else [(1, 850), (16, 850), (64, 850), (256, 850)]:
            batch = decodes(*case, *sizes)
            for keys, part, parts in [(64, None, 1)] if small else CHOICES:
                row = (*case, keys, part, parts, microseconds(batch, keys, part, parts))
                about["rows"].append(dict(zip(COLUMNS, row)))
                print(about["rows"][-1], flush=True)
                write_json(about, Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
