"""ModelRunner: a schedule in, sampled tokens out. It owns the model and the KV cache."""

import mmap
import os
from array import array
from collections.abc import Iterable
from dataclasses import fields, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F

from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.cpu import Threads, keep_freed_memory
from nanovllm.cuda_graphs import DecodeGraphs, Tensors, to_device
from nanovllm.host_cache import STAGED_BYTES, HostCache
from nanovllm.layers.attention import Batch, copy_blocks
from nanovllm.layers.sampler import Sampling, sample, top_logprobs
from nanovllm.loader import load_model
from nanovllm.models.qwen import head_dim_of
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Schedule
from nanovllm.sequence import Request, Sequence


def choose_device(config: Config) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device, found = torch.device(config.device), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise ValueError(f"device={config.device!r} is not allowed: PyTorch finds {found} CUDA devices here")
    return device


def choose_dtype(config: Config, hf_config, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cuda":
        own = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
        return torch.float16 if own == torch.float16 else torch.bfloat16
    in_hardware = torch.cpu._is_avx512_bf16_supported() and config.model != EMBEDDED_MODEL
    return torch.bfloat16 if in_hardware else torch.float32


def integers(values: Iterable[int]) -> torch.Tensor:
    """[n] int64. Several times faster than torch.tensor(list)."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def choose_triton(config: Config, device: torch.device) -> bool:
    can_run = find_spec("triton") and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
    if config.attention_backend == "triton" and not can_run:
        raise ValueError("attention_backend='triton' is not allowed: it needs a GPU, or TRITON_INTERPRET=1 on Linux")
    return config.attention_backend == "triton" or bool(
        config.attention_backend == "auto" and can_run and device.type == "cuda"
    )


class ModelRunner:
    def __init__(self, config: Config, hf_config, path: Path, device: torch.device):
        self.threads = Threads(device)
        if device.type == "cpu":
            keep_freed_memory()
        if device.index is not None:
            torch.cuda.set_device(device)  # where Triton launches
        self.device = device
        self.dtype = choose_dtype(config, hf_config, device)
        self.use_triton = choose_triton(config, device)
        self.block_size = config.block_size
        self.vocab_size = hf_config.vocab_size
        self.model = load_model(path, hf_config, config.max_model_len, self.dtype, device)
        self.weights_per_layer = sum(weight.numel() for weight in self.model.model.layers[0].parameters())
        self.num_layers = hf_config.num_hidden_layers
        self.block_shape = (config.block_size, hf_config.num_key_value_heads, head_dim_of(hf_config))
        self.block_bytes = 2 * self.num_layers * torch.Size(self.block_shape).numel() * self.dtype.itemsize
        self.graphs: DecodeGraphs | None = None
        self.host_cache: HostCache | None = None
        self.useful_blocks = config.max_num_seqs * -(-config.max_model_len // config.block_size)  # more are no use
        self.num_host_blocks = 0
        if config.preemption_mode == "swap":
            self.num_host_blocks = min(int(config.swap_gib * 2**30) // self.block_bytes, self.useful_blocks)
            config.require("swap_gib", self.num_host_blocks, f"room for a KV block of {self.block_bytes:,} bytes")
        self.num_blocks = config.num_blocks or self._num_blocks_that_fit(config)
        try:
            self.kv_cache = self._new_kv_cache(self.num_blocks)
            if self.num_host_blocks:
                self.host_cache = HostCache(self.kv_cache, self.num_host_blocks)
        except (OSError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"there is no memory for {self.num_blocks} KV blocks (num_blocks, kv_cache_gib) and "
                f"{self.num_host_blocks} on the host (swap_gib), of {self.block_bytes:,} bytes each"
            ) from error
        if self.use_triton and not config.enforce_eager:  # the PyTorch reference asks for lengths: not to be recorded
            graphs = self._new_graphs(config)
            for size in reversed(graphs.sizes):
                graphs.record(size)
            self.graphs = graphs

    def _new_kv_cache(self, num_blocks: int) -> torch.Tensor:
        """Zeros, so that whoever reads a slot that nobody wrote makes the same mistake every time."""
        shape = (2, self.num_layers, num_blocks, *self.block_shape)
        if self.device.type == "cpu":  # anonymous pages are zero and take no memory before they are touched
            buffer = mmap.mmap(-1, torch.Size(shape).numel() * self.dtype.itemsize)
            return torch.frombuffer(buffer, dtype=self.dtype).view(shape)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _new_graphs(self, config: Config) -> DecodeGraphs:
        width = -(-config.max_model_len // self.block_size)
        return DecodeGraphs(self._forward, config.max_num_seqs, width, self.device)

    def _num_blocks_that_fit(self, config: Config) -> int:
        """The memory that the model leaves is cut into blocks."""
        available = int(config.kv_cache_gib * 2**30)
        if self.device.type == "cuda":
            available = self._memory_left(config)
        num_blocks = min(available // self.block_bytes, self.useful_blocks)
        if num_blocks < 1:
            raise ValueError(
                f"no memory is left for a KV block of {self.block_bytes:,} bytes: {available:,} bytes are available"
            )
        return num_blocks

    def _memory_left(self, config: Config) -> int:
        """Bytes of a GPU that are left for the KV cache, learned from trials on a cache of one block."""
        self.kv_cache = self._new_kv_cache(1)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._profile(config)
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)  # other processes, CUDA's own context
        peak = torch.cuda.max_memory_allocated(self.device)
        graphs = 0 if config.enforce_eager or not self.use_triton else self._graph_memory(config)
        staged = STAGED_BYTES if config.preemption_mode == "swap" else 0
        self.kv_cache = None
        return int(total * config.gpu_memory_utilization) - others - peak - graphs - staged

    def _graph_memory(self, config: Config) -> int:
        """Bytes that CUDA graphs will take: the largest has the activations, each other one about the same little."""
        graphs, free = self._new_graphs(config), [torch.cuda.mem_get_info(self.device)[0]]
        for size in (graphs.sizes[-1], graphs.sizes[0]):
            graphs.record(size)
            free.append(torch.cuda.mem_get_info(self.device)[0])
        largest, another = free[0] - free[1], free[1] - free[2]
        return largest + another * (len(graphs.sizes) - 1)

    def _profile(self, config: Config) -> None:
        """Runs the largest step there can be, on a cache of one block, to learn what activations and sampling take."""
        num_tokens = config.max_num_batched_tokens
        num_seqs = max(min(config.max_num_seqs, num_tokens), -(-num_tokens // config.max_model_len))
        length = num_tokens // num_seqs
        requests = [Request(None, None, [0] * length, SamplingParams(top_p=0.9)) for _ in range(num_seqs)]
        for request in requests:
            request.sequences[0].block_table = [0] * -(-length // self.block_size)
        self.run(Schedule([(request.sequences[0], length) for request in requests]))

    @torch.inference_mode()
    def run(self, schedule: Schedule) -> tuple[list[int], list[dict[int, float] | None]]:
        """Computes a step. For each of `schedule.sampled`: a token, and its log-probabilities if asked for."""
        with self.threads.of_step(schedule.num_tokens * self.weights_per_layer):
            return self._run(schedule)

    def _run(self, schedule: Schedule) -> tuple[list[int], list[dict[int, float] | None]]:
        sampled = schedule.sampled
        self.move_blocks(schedule)
        inputs, sampling = self._prepare(schedule), self._sampling(sampled)
        size = self.graphs and self.graphs.size_for(schedule)
        if size:
            inputs = self.graphs.padded(inputs, size)
        options = {name: value for name, value in vars(sampling).items() if isinstance(value, torch.Tensor)}
        moved = to_device(inputs | options, self.device, self.graphs.buffer if size else None)
        hidden = self.graphs.steps[size]() if size else self._forward(moved)
        if not sampled:
            return [], []
        logits = self.model.logits(hidden[moved["sampled_rows"]])
        token_ids = sample(logits, replace(sampling, **{name: moved[name] for name in options}), self.use_triton)
        return token_ids.tolist(), self._logprobs(logits, token_ids, sampled)

    def move_blocks(self, schedule: Schedule) -> None:
        """What is to be moved before the step computes."""
        if self.host_cache is not None:
            self.host_cache.swap_out(schedule.swaps_out)
            self.host_cache.swap_in(schedule.swaps_in)
        if schedule.copies:
            copy_blocks(self.kv_cache, schedule.copies, self.use_triton)

    def _forward(self, inputs: Tensors) -> torch.Tensor:
        metadata = {field.name: inputs[field.name] for field in fields(Batch) if field.name in inputs}
        batch = Batch(kv_cache=self.kv_cache, use_triton=self.use_triton, **metadata)
        return self.model(inputs["input_ids"], inputs["positions"], batch)

    def _prepare(self, schedule: Schedule) -> Tensors:
        """One flat, ragged batch: ids and positions of all tokens, the fields of Batch, and the rows to sample from."""
        seqs = [seq for seq, _ in schedule.items]
        counts = integers([num_tokens for _, num_tokens in schedule.items])
        starts = integers([seq.num_computed_tokens for seq in seqs])
        contexts, ends = starts + counts, counts.cumsum(0)
        token_ids = (seq.token_ids[seq.num_computed_tokens : seq.num_computed_tokens + n] for seq, n in schedule.items)
        owners = torch.repeat_interleave(counts)
        positions = torch.arange(len(owners)) + (contexts - ends)[owners]
        width = max(len(seq.block_table) for seq in seqs)
        tables = array("i")  # 32 bits
        for seq in seqs:
            tables.fromlist(seq.block_table + [0] * (width - len(seq.block_table)))
        block_tables = torch.frombuffer(tables, dtype=torch.int32).view(len(seqs), width)
        block_ids = block_tables[owners, positions // self.block_size].long()
        return {
            "input_ids": integers(chain.from_iterable(token_ids)),
            "positions": positions,
            "slot_mapping": block_ids * self.block_size + positions % self.block_size,
            "cu_seqlens_q": F.pad(ends, (1, 0)).int(),
            "context_lens": contexts.int(),
            "block_tables": block_tables,
            "sampled_rows": (ends - 1)[[i for i, _ in schedule.sampled_items]],
        }

    def _sampling(self, seqs: list[Sequence]) -> Sampling:
        """How each sequence draws its token. Filters that nobody uses are None, and all are if everybody is greedy."""
        params = [seq.request.params for seq in seqs]
        if all(p.temperature == 0 for p in params):
            return Sampling()
        temperature, top_p, min_p = (
            torch.frombuffer(array("f", [getattr(p, name) for p in params]), dtype=torch.float32)
            for name in ("temperature", "top_p", "min_p")
        )
        top_k = integers([min(p.top_k, self.vocab_size) if p.top_k > 0 else self.vocab_size for p in params])
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

    def _logprobs(self, logits, token_ids, seqs: list[Sequence]) -> list[dict[int, float] | None]:
        wanted = [seq.request.num_logprobs for seq in seqs]
        if all(k is None for k in wanted):
            return [None] * len(seqs)
        values, ids = top_logprobs(logits, token_ids, min(max(k for k in wanted if k is not None), self.vocab_size))
        rows = zip(wanted, ids.tolist(), values.tolist())
        return [None if k is None else dict(zip(i[: k + 1], v[: k + 1])) for k, i, v in rows]
