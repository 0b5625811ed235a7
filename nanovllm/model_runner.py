"""ModelRunner: a schedule in, sampled tokens out. It owns the model and the KV cache."""

import os
from array import array
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.config import EMBEDDED_MODEL, Config, Limits
from nanovllm.cpu import Threads
from nanovllm.cuda_graphs import DecodeGraphs
from nanovllm.host_cache import HostCache
from nanovllm.layers import torch_ops
from nanovllm.layers.batch import Batch
from nanovllm.layers.ops import Ops
from nanovllm.layers.sampler import Sampling, top_logprobs
from nanovllm.loader import load_model
from nanovllm.memory import CacheShape, keep_freed_memory, num_blocks_that_fit, warm_up
from nanovllm.models.qwen import head_dim_of
from nanovllm.schedule import Schedule
from nanovllm.sequence import Sequence
from nanovllm.step import StepInputs

LogProbs = dict[int, float] | None  # of a token and of the most likely ones, if requested


def choose_device(config: Config) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device, found = torch.device(config.device), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise ValueError(
            f"device={config.device!r} is not allowed: PyTorch finds {found} CUDA devices"
        )
    return device


def choose_dtype(config: Config, hf_config, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cuda":
        own = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
        return torch.float16 if own == torch.float16 else torch.bfloat16
    in_hardware = torch.cpu._is_avx512_bf16_supported() and config.model != EMBEDDED_MODEL
    return torch.bfloat16 if in_hardware and config.attention_backend != "triton" else torch.float32


def choose_ops(config: Config, device: torch.device) -> Ops:
    can_run = find_spec("triton") and (
        device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    )
    backend = config.attention_backend
    if backend == "triton" and not can_run:
        raise ValueError(
            "attention_backend='triton' is not allowed: it needs a GPU, or TRITON_INTERPRET=1 on Linux"
        )
    if backend == "torch" or (backend == "auto" and device.type == "cpu") or not can_run:
        return torch_ops
    from nanovllm.layers import (
        triton_ops,
    )  # not at the top: Triton does not exist on macOS and Windows

    return triton_ops


def integers(values: Iterable[int]) -> Tensor:
    """[n] int64. Several times faster than torch.tensor(list)."""
    numbers = array("q", values)
    return (
        torch.frombuffer(numbers, dtype=torch.int64)
        if numbers
        else torch.zeros(0, dtype=torch.int64)
    )


class ModelRunner:
    def __init__(self, config: Config, limits: Limits, hf_config, path: Path, device: torch.device):
        self.device, self.limits, self.threads = device, limits, Threads(device)
        if device.type == "cpu":
            keep_freed_memory()
        # Triton launches on the current device, which belongs to the thread: another may be the caller's
        self.on_device = (
            partial(torch.cuda.device, device) if device.type == "cuda" else nullcontext
        )
        self.dtype = choose_dtype(config, hf_config, device)
        self.ops = choose_ops(config, device)
        is_interpreted = config.attention_backend == "triton" and device.type == "cpu"
        is_wrong = is_interpreted and self.dtype == torch.bfloat16
        config.require(
            "dtype",
            not is_wrong,
            "float32 or float16: Triton's interpreter multiplies bfloat16 wrongly",
        )
        self.vocab_size = hf_config.vocab_size
        self.model = load_model(path, hf_config, limits.max_model_len, self.dtype, device, self.ops)
        self.weights_per_layer = sum(
            weight.numel() for weight in self.model.model.layers[0].parameters()
        )
        kv_heads, head_dim = hf_config.num_key_value_heads, head_dim_of(hf_config)
        self.shape = CacheShape(
            hf_config.num_hidden_layers, config.block_size, kv_heads, head_dim, self.dtype
        )
        self.max_blocks_per_seq = -(-limits.max_model_len // config.block_size)
        self.num_useful_blocks = limits.max_num_seqs * self.max_blocks_per_seq
        self.has_graphs = self.ops.CAN_BE_RECORDED and not config.enforce_eager
        self.graphs: DecodeGraphs | None = None
        self.host_cache: HostCache | None = None
        self.num_host_blocks = 0
        if config.preemption_mode == "swap":
            most = int(config.swap_gib * 2**30) // self.shape.block_bytes
            self.num_host_blocks = min(most, self.num_useful_blocks)
            config.require(
                "swap_gib", most, f"room for a KV block of {self.shape.block_bytes:,} bytes"
            )
        with self.on_device():
            self._allocate(config)

    def _allocate(self, config: Config) -> None:
        """The KV cache and the CUDA graphs, once the model is there. Raises ValueError if there is no memory for them."""
        self.num_blocks = config.num_blocks or num_blocks_that_fit(self, config)
        try:
            self.kv_cache = self.shape.new_cache(self.num_blocks, self.device)
            if self.num_host_blocks:
                self.host_cache = HostCache(self.kv_cache, self.num_host_blocks)
        except (OSError, RuntimeError, OverflowError) as error:
            blocks = f"{self.num_blocks} KV blocks (num_blocks, kv_cache_gib) and {self.num_host_blocks} host blocks (swap_gib)"
            raise ValueError(
                f"not enough memory for {blocks} of {self.shape.block_bytes:,} bytes each"
            ) from error
        if self.device.type == "cuda":
            warm_up(self)
        if self.has_graphs:
            self.graphs = self.new_graphs()
            for size in reversed(self.graphs.sizes):
                self.graphs.record(size)

    def new_graphs(self) -> DecodeGraphs:
        return DecodeGraphs(
            self.model, self.limits.max_num_seqs, self.limits.max_model_len, self.kv_cache
        )

    @torch.inference_mode()
    def run(self, schedule: Schedule) -> tuple[list[int], list[LogProbs] | None]:
        """Computes a step. Returns a token for each of `schedule.sampled`, and its log-probabilities if requested."""
        with self.threads.of_step(schedule.num_tokens * self.weights_per_layer), self.on_device():
            if schedule.moves:
                self.move_blocks(schedule)
            step = self._prepare(schedule)
            if self.graphs is not None and (size := self.graphs.size_for(schedule)):
                hidden, step = self.graphs.run(step, size)
            else:
                step = step if self.device.type == "cpu" else step.to(self.device)
                hidden = self.model(step.input_ids, step.positions, step.batch)
            if not schedule.sampled:
                return [], None
            logits = self.model.lm_head(hidden[step.sampled_rows])
            # max takes the first of equal logits, like argmax, which is four times as slow on a CPU
            token_ids = (
                logits.max(-1).indices
                if step.sampling is None
                else self.ops.sample(logits, step.sampling)
            )
            wanted = [seq.request.num_logprobs for seq in schedule.sampled]
            logprobs = (
                self._logprobs(logits, token_ids, wanted)
                if any(k is not None for k in wanted)
                else None
            )
            return token_ids.tolist(), logprobs

    def move_blocks(self, schedule: Schedule) -> None:
        """Moves blocks before the step computes: swaps first, then copies."""
        if self.host_cache is not None:
            self.host_cache.swap_out(schedule.moves.swaps_out)
            self.host_cache.swap_in(schedule.moves.swaps_in)
        if schedule.moves.copies:
            self.ops.copy_blocks(self.kv_cache, schedule.moves.copies)

    def _prepare(self, schedule: Schedule) -> StepInputs:
        """One flat, ragged batch. For example, two sequences with blocks of 4 tokens, the first with 4 tokens in the
        cache and 1 to compute, the second with none in the cache and 3 to compute:

            counts         [1, 3]          tokens to compute
            starts         [4, 0]          tokens in the cache before ...
            contexts       [5, 3]          ... and after the step
            ends           [1, 4]          where each sequence ends in the batch
            seq_of_token   [0, 1, 1, 1]
            positions      [4, 0, 1, 2]
            block_tables   [7, 2, 5]       that of the first, then that of the second, which begins at ...
            cu_blocks      [0, 2, 3]       ... 2
            slots          [8, 20, 21, 22]  block 2, offset 0, then block 5
            sampled_rows   [0, 3]          where the last tokens are
        """
        items, sampled, block_size = schedule.items, schedule.sampled, self.shape.block_size
        rows, is_chunk = [*schedule.sampled_from], [num_tokens > 1 for _, _, num_tokens in items]
        if any(is_chunk) and not all(is_chunk):  # attention wants those with one token first
            order = sorted(range(len(items)), key=is_chunk.__getitem__)
            items, place = [items[i] for i in order], {i: row for row, i in enumerate(order)}
            rows = [place[i] for i in rows]
        counts = integers([num_tokens for _, _, num_tokens in items])
        starts = integers([start for _, start, _ in items])
        contexts, ends = starts + counts, counts.cumsum(0)
        token_ids, tables, table_ends, most = (
            array("q"),
            array("i"),
            array("i", [0]),
            self.max_blocks_per_seq,
        )
        for seq, begin, num_tokens in items:
            table = seq.block_table
            token_ids.fromlist(seq.token_ids[begin : begin + num_tokens])
            tables.fromlist(table if len(table) <= most else table[:most])
            table_ends.append(len(tables))
        seq_of_token = torch.repeat_interleave(counts)
        positions = torch.arange(len(token_ids)) + (contexts - ends)[seq_of_token]
        cu_blocks, block_tables = (
            torch.frombuffer(x, dtype=torch.int32) for x in (table_ends, tables)
        )
        block_ids = block_tables[cu_blocks[seq_of_token] + positions // block_size].long()
        slots, seq_starts = (
            block_ids * block_size + positions % block_size,
            F.pad(ends, (1, 0)).int(),
        )
        num_decodes, longest = len(items) - sum(is_chunk), int(contexts.max())
        batch = Batch(
            self.kv_cache,
            slots,
            seq_starts,
            contexts.int(),
            cu_blocks,
            block_tables,
            num_decodes,
            longest,
        )
        sampling = None
        if any(seq.request.params.temperature for seq in sampled):
            sampling = self._sampling([seq for seq in sampled])
        input_ids = torch.frombuffer(token_ids, dtype=torch.int64)
        return StepInputs(input_ids, positions, batch, (ends - 1)[integers(rows)], sampling)

    def _sampling(self, seqs: list[Sequence]) -> Sampling:
        """How each sequence draws its token. Filters that no sequence uses are None."""
        params = [seq.request.params for seq in seqs]
        floats = array("f", chain.from_iterable((p.temperature, p.top_p, p.min_p) for p in params))
        temperature, top_p, min_p = (
            torch.frombuffer(floats, dtype=torch.float32).view(-1, 3).T.contiguous()
        )
        top_k = integers(
            [min(p.top_k, self.vocab_size) if p.top_k > 0 else self.vocab_size for p in params]
        )
        drawn = temperature > 0
        limit = int(top_k[drawn].max())
        return Sampling(
            temperature=temperature,
            seed=integers([seq.seed for seq in seqs]),
            position=integers([len(seq) for seq in seqs]),
            top_k=top_k if (top_k[drawn] < self.vocab_size).any() else None,
            top_p=top_p if (top_p[drawn] < 1).any() else None,
            min_p=min_p if (min_p[drawn] > 0).any() else None,
            max_top_k=limit if limit < self.vocab_size else None,
        )

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, wanted: list[int | None]
    ) -> list[LogProbs]:
        """Of the chosen tokens, and of as many of the most likely ones as each sequence wants."""
        most = max(k for k in wanted if k is not None)
        values, ids = top_logprobs(logits, token_ids, min(most, self.vocab_size))
        rows = zip(wanted, ids.tolist(), values.tolist())
        return [None if k is None else dict(zip(i[: k + 1], v[: k + 1])) for k, i, v in rows]
