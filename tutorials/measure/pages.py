"""How much of the KV cache is wasted if its blocks are pages that the hardware maps?

    python -m tutorials.measure.pages --json tutorials/results/pages.json
    python -m tutorials.measure.pages --trace AzureLLMInferenceTrace_conv.csv \
        --json tutorials/results/pages.json

Paging in software chooses its blocks: 16 tokens, without padding. vAttention (ASPLOS 2025) maps
whole pages, and the hardware says how large they are. A large page in which all layers of a few
tokens lie must be padded; one with a single layer of many tokens is wasted where a sequence ends.

The requests of `tutorials.baselines.replay` go through the real scheduler and block manager without
a model (about five minutes with a trace, half as long without). All wait from the start, and all
caches take the same bytes. The averages are over the steps in which a request waits only because
memory lacks. Prefixes are not shared: no two prompts begin with the same token. Lengths with the
means of ShareGPT are drawn; lengths of the trace are recorded.

Blocks are cut into pieces by the rule of `nanovllm.vattention.cache.VirtualShape`, also in ways that
it would not choose. A mapping shows one piece. A GPU maps each of its `pages_per_piece` by itself:
there it takes as many mappings as pages are in use, whatever the layout.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from nanovllm.block_manager import BlockManager
from nanovllm.config import Limits
from nanovllm.layers.kv_cache import CacheShape
from nanovllm.simulator.cost_model import SHAPES, shape_of
from nanovllm.vattention.cache import VirtualShape
from nanovllm.vattention.memory import HostMemory, System
from tutorials.arguments import experiment
from tutorials.baselines.replay import Lengths, Setting, lognormal_lengths, replay
from tutorials.machine import environment
from tutorials.report import rows_of, table, write_json
from tutorials.simulation.requests import read_trace

MODEL = "qwen3-0.6b"
MEMORY = 20 * 10**9  # bytes: what its weights leave of a GPU with 24 GB, about
SETTING = Setting(max_model_len=16_384, max_num_batched_tokens=8192)
EVERY = 50  # steps: the cache is looked at
PAGES = {  # bytes
    "4 KiB": 4 * 2**10,
    "64 KiB": 64 * 2**10,
    "128 KiB": 128 * 2**10,
    "256 KiB": 256 * 2**10,
    "2 MiB": 2 * 2**20,
}


class Layout(NamedTuple):
    """How the tokens of a block lie in memory."""

    block_size: int  # tokens
    num_pieces: int  # of a block; each is mapped as a whole
    block_bytes: int  # with padding
    pages_per_piece: int = 0  # none, if nothing is mapped

    @property
    def packed(self) -> float:
        """Which part of a full block is not padding."""
        return self.block_size * TOKEN_BYTES / self.block_bytes


# --- the layouts ---


def cache_shape(block_size: int) -> CacheShape:
    dtype = torch.bfloat16
    model = shape_of(SHAPES[MODEL], dtype.itemsize)
    return CacheShape(model.layers, block_size, model.kv_heads, model.head_dim, dtype)


TOKEN_BYTES = cache_shape(1).block_bytes  # keys and values of all layers
NUM_LAYERS = cache_shape(1).num_layers
SOFTWARE = Layout(16, 1, 16 * TOKEN_BYTES)


def fullest(page_bytes: int, num_pieces: int) -> int:
    """Tokens whose pieces fill a page best, a power of two; or 1, in as many pages as it takes."""
    num_fitting = page_bytes * num_pieces // TOKEN_BYTES
    return 1 << max(0, num_fitting.bit_length() - 1)


def unpadded(page_bytes: int, num_pieces: int) -> int:
    """The fewest tokens whose pieces end where a page ends."""
    return page_bytes // math.gcd(page_bytes, TOKEN_BYTES // num_pieces)


LAYOUTS: dict[str, tuple[int, Callable[[int, int], int]]] = {  # pieces, tokens of a block
    "all layers": (1, fullest),
    "all layers, unpadded": (1, unpadded),
    "a page for each layer": (NUM_LAYERS, fullest),
    "keys and values apart": (2 * NUM_LAYERS, fullest),
}


def mapped(page_bytes: int, num_pieces: int, block_size: int) -> Layout:
    limits = Limits(
        max_model_len=SETTING.max_model_len,
        max_num_batched_tokens=SETTING.max_num_batched_tokens,
        max_num_seqs=1,
    )
    system = System(page_bytes, num_mappings=2**62, new_memory=HostMemory)
    shape = VirtualShape(cache_shape(block_size), limits, system)
    pieces = shape.cut(num_pieces, limits)
    return Layout(block_size, pieces.num, pieces.num * pieces.size, pieces.size // page_bytes)


def all_layouts() -> dict[str, Layout]:
    layouts = {"software": SOFTWARE}
    for page, page_bytes in PAGES.items():
        for name, (num_pieces, tokens_of) in LAYOUTS.items():
            block_size = tokens_of(page_bytes, num_pieces)
            layouts[f"{page}, {name}"] = mapped(page_bytes, num_pieces, block_size)
    return layouts


# --- what they waste ---


def measure(lengths: Lengths, layouts: dict[str, Layout]) -> dict[str, dict]:
    """What each layout makes of the same memory. Raises ValueError for too few requests."""

    @cache
    def usage(block_size: int, num_blocks: int) -> dict:
        setting = replace(SETTING, num_slots=num_blocks * block_size)
        return replay(lengths, BlockManager, block_size, setting, EVERY)

    results = {}
    for name, layout in layouts.items():
        num_blocks = MEMORY // layout.block_bytes
        results[name] = result(layout, num_blocks, usage(layout.block_size, num_blocks))
    return results


def result(layout: Layout, num_blocks: int, usage: dict) -> dict:
    """`tokens`, `padding` and `empty` are shares of the memory in use, and add up to 1. `padding`
    is also that of empty slots. Blocks, mappings and requests are means."""
    written = usage["token_states"] + usage["being_written"]
    in_use = usage["token_states"] + usage["reserved"] + usage["internal_fragmentation"]
    filled = written / in_use
    num_used = in_use * num_blocks
    return {
        **layout._asdict(),
        "padding_per_token": 1 / layout.packed - 1,
        "tokens": layout.packed * filled,
        "padding": 1 - layout.packed,
        "empty": layout.packed * (1 - filled),
        "num_blocks": num_blocks,
        "used_blocks": num_used,
        "mappings": num_used * layout.num_pieces if layout.pages_per_piece else 0,
        "running": usage["running"],
        "preemptions": usage["preemptions"],
        "steps": usage["steps"],
    }


def shown(results: dict[str, dict]) -> str:
    header = "pages|tokens/block|padding/token|tokens|padding|empty|running|mappings"
    columns = [("block_size", ","), ("padding_per_token", ".1%")]
    columns += [("tokens", ".1%"), ("padding", ".1%"), ("empty", ".1%")]
    columns += [("running", ".1f"), ("mappings", ",.0f")]
    return table(header, columns, results)


CHOSEN = [
    "software",
    "4 KiB, all layers",
    "64 KiB, a page for each layer",
    "2 MiB, all layers",
    "2 MiB, all layers, unpadded",
    "2 MiB, a page for each layer",
    "2 MiB, keys and values apart",
]


def chosen_rows(report: dict) -> list[list[str]]:
    """What pages waste, of chosen sizes and layouts, on all loads."""
    loads = {name.partition(",")[0]: load["layouts"] for name, load in report["pages"].items()}
    records = {}
    for name in CHOSEN:
        records[name] = {load: layouts[name] for load, layouts in loads.items()}
    header = "pages|tokens per block"
    columns: list[tuple] = [(f"{next(iter(loads))}.block_size", ",")]
    for load in loads:
        for kind in ("tokens", "running"):
            header += f"|{load}: {kind}"
            columns.append((f"{load}.{kind}", ".0f" if kind == "running" else ".1%"))
    return rows_of(header, columns, records)


def loads(trace: Path | None, count: int) -> dict[str, Lengths]:
    """Raises ValueError for a file that is no trace."""
    found = {"ShareGPT, lengths drawn": lognormal_lengths("ShareGPT", count)}
    if trace:
        rows = read_trace(trace, count, None)
        found["Azure, lengths recorded"] = [(prompt, output) for prompt, output, _ in rows]
    return found


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument(
        "--trace", type=Path, help="CSV with TIMESTAMP, ContextTokens and GeneratedTokens"
    )
    parser.add_argument("--requests", type=int, default=2000, help="of each load")
    args = parser.parse_args()
    report = environment() | {"device": "none: no model is run", "model": MODEL}
    report |= {"memory_bytes": MEMORY, "token_bytes": TOKEN_BYTES, "pages": {}}
    try:
        for name, lengths in loads(args.trace, args.requests).items():
            results = measure(lengths, all_layouts())
            report["pages"][name] = {"requests": len(lengths), "layouts": results}
            print(f"{name}: {len(lengths):,} requests\n\n{shown(results)}\n", flush=True)
    except ValueError as error:
        parser.error(str(error))
    write_json(report, args.json)


if __name__ == "__main__":
    main()
