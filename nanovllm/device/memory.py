"""Memory: how much a GPU has left for the KV cache, and the steps that try it out."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.config import Config, Limits
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Request
from nanovllm.step import Recorder

NO_TEXTS = SimpleNamespace(tokenizer=None, vocab_size=1)


# --- what a GPU has left, measured on a cache of one block ---


def memory_left(runner: Any, config: Config) -> int:
    """Bytes of GPU memory for the KV cache of a ModelRunner. A draft model is loaded before."""
    device = runner.device
    shape = runner.shape
    runners = [runner, runner.draft] if runner.draft else [runner]
    for one in runners:
        one.allocate(1, 0)
    free_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    for one in runners:
        one.launch(largest_step(runner.limits, shape.block_size))
    peak = torch.cuda.max_memory_reserved(device)  # reserved bytes: fragmentation counts, too
    _, total = torch.cuda.mem_get_info(device)
    # other processes, CUDA's own context
    others = total - free_memory(device) - torch.cuda.memory_reserved(device)
    graphs = 0
    for one in () if config.enforce_eager else runners:
        recorder = one.new_recorder()
        graphs += graph_memory(device, recorder) if recorder is not None else 0
    # swapping gathers a block before it goes to the host
    gathered = shape.block_bytes if config.preemption_mode == "swap" else 0
    for one in runners:
        del one.caches, one.kv_cache
    granted = int(total * config.gpu_memory_utilization)
    return granted - others - peak - graphs - gathered


def graph_memory(device: torch.device, graphs: Recorder) -> int:
    """Bytes that the CUDA graphs will take.

    The largest has the activations, which the others reuse. Each of these takes at most as much as
    the second largest.
    """
    before = free_memory(device)
    graphs.record(graphs.sizes[-1])
    after_largest = free_memory(device)
    second_largest = graphs.sizes[-2:][0]  # the only one, if it is alone
    graphs.record(second_largest)
    another = after_largest - free_memory(device)
    return before - after_largest + another * (len(graphs.sizes) - 1)


def free_memory(device: torch.device) -> int:
    """Bytes of GPU memory that no program uses.

    Empties PyTorch's cache first. Recording a graph empties it, too, so that otherwise free memory
    would seem to grow.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


# --- steps without a request ---


def largest_step(limits: Limits, block_size: int) -> Schedule:
    """The step that needs the most memory for activations and sampling."""
    num_tokens = limits.max_num_batched_tokens
    fewest_seqs = -(-num_tokens // limits.max_model_len)
    num_seqs = max(min(limits.max_num_seqs, num_tokens), fewest_seqs)
    # sorts the whole vocabulary, if the backend sorts; logits in fp32, and a mask of all tokens
    params = SamplingParams(
        temperature=1e6, top_p=0.9999999, repetition_penalty=1.1, allowed_token_ids=[0]
    )
    return dummy_step(num_seqs, 0, num_tokens // num_seqs, block_size, params)


def warm_up_steps(
    device: torch.device, limits: Limits, block_size: int, dtype: torch.dtype
) -> Iterator[Schedule]:
    """Steps that launch each kernel in every variant that serving can need.

    So none is compiled while requests wait: a chunk of a prompt with more tokens than the smallest
    tile of queries, a decode, tokens that are drawn, copied blocks, and logits in fp32. On a GPU
    the chunk is the longest, since products of many rows are kernels of their own.
    """
    params = SamplingParams(top_p=0.9)
    longest = min(limits.max_model_len, limits.max_num_batched_tokens)
    chunk = min(17, longest) if device.type == "cpu" else longest
    yield dummy_step(1, 0, chunk, block_size, params)
    yield dummy_step(1, 0, 1, block_size, params)
    if dtype != torch.float32:  # penalties make logits fp32
        penalized = SamplingParams(top_p=0.9, repetition_penalty=1.1)
        yield dummy_step(1, 0, 1, block_size, penalized)


def dummy_step(
    num_seqs: int, start: int, end: int, block_size: int, params: SamplingParams
) -> Schedule:
    """Sequences of `end` tokens, of which `start` are computed. All their blocks are the first."""
    schedule = Schedule()
    schedule.moves.copies.append((0, 0))
    for _ in range(num_seqs):
        request = Request("", None, [0] * end, params)
        if request.needs_rules:
            from nanovllm.topics.decoding.rules import rules_of  # chapter 08

            request.rules = rules_of(request, NO_TEXTS)
        (seq,) = request.sequences
        seq.block_table = [0] * -(-end // block_size)
        schedule.add(Item(seq, start, end - start))
    return schedule
