"""One decode step of a larger model, whose random weights are in no file."""

import gc
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from transformers import AutoConfig

from nanovllm import LLM, SamplingParams, model_runner
from nanovllm.device import cuda_graphs, memory
from nanovllm.loader import new_model
from nanovllm.model_runner import ModelRunner
from nanovllm.models.qwen import Qwen
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Request
from nanovllm.simulator.cost_model import shape_of, work_of
from tutorials.machine import seconds_of
from tutorials.measure.checkpoints import COMMON
from tutorials.measure.first_contact.section import Section
from tutorials.report import percentile

BLOCK_SIZE = 16


def larger_step(section: Section) -> dict:
    """All its layers, and keys and values that are 0: neither changes what a step takes."""
    sizes = section.sizes
    blocks_each = -(-sizes.context // BLOCK_SIZE)
    shape = shape_of(sizes.larger, section.dtype.itemsize)
    items = [(1, sizes.context)] * sizes.batch
    gc.collect()  # the engine before
    needed = shape.weight_bytes + sizes.batch * blocks_each * BLOCK_SIZE * shape.kv_bytes
    if not section.cpu and memory.free_memory(section.device) < needed + 2**32:
        return {"left_out": f"it needs {needed / 2**30 + 4:.0f} GiB"}
    runner = only_runner(section, sizes.batch * blocks_each)
    schedule = decodes(sizes.batch, sizes.context, blocks_each)
    runner.run(schedule)
    wall = [seconds_of_run(runner, schedule) for _ in range(sizes.steps)]
    graph = runner.graphs.replays[sizes.batch]
    replays = [seconds_of(graph, section.device) for _ in range(sizes.steps)]
    median = percentile(replays, 50) or 0.0
    work = work_of(shape, items, sampled=0)
    return {
        "hidden_size": sizes.larger["hidden_size"],
        "layers": shape.layers,
        "sequences": sizes.batch,
        "context": sizes.context,
        "wall_ms": 1000 * (percentile(wall, 50) or 0.0),  # of the runner, without the scheduler
        "graph_ms": 1000 * median,
        "bytes_per_second": work.bytes / median,
        "flops_per_second": work.flops / median,
    }


def seconds_of_run(runner: ModelRunner, schedule: Schedule) -> float:
    """By the host's clock: a run ends with its tokens."""
    return seconds_of(lambda: runner.run(schedule), torch.device("cpu"))


def only_runner(section: Section, num_blocks: int) -> ModelRunner:
    """With one graph of decodes: that of the whole batch."""
    folder = section.folder / "larger"
    AutoConfig.for_model(**COMMON | section.sizes.larger).save_pretrained(folder)
    with (
        mock.patch.object(model_runner, "load_model", random_model),
        mock.patch.object(cuda_graphs, "DECODES", [section.sizes.batch]),
    ):
        llm = LLM(
            str(folder),
            dtype=section.dtype_name,
            attention_backend="triton",
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=section.sizes.batch,
            max_model_len=section.sizes.options["max_model_len"],
        )
    return llm.runner


def random_model(path: Path, config, max_model_len: int, dtype, device, ops) -> Qwen:
    """In place of `load_model`."""
    model = new_model(config, max_model_len, dtype, device, ops)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(std=0.02)
        else:
            nn.init.ones_(weight)
    return model.eval()


def decodes(count: int, context: int, blocks_each: int) -> Schedule:
    """A step in which each sequence computes its last token, and reads blocks of its own."""
    schedule = Schedule()
    params = SamplingParams(temperature=0.6)
    for i in range(count):
        (seq,) = Request("", None, [0] * context, params).sequences
        seq.block_table = list(range(i * blocks_each, (i + 1) * blocks_each))
        schedule.add(Item(seq, context - 1, 1))
    return schedule
