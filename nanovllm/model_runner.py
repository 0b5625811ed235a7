"""ModelRunner: a schedule in, sampled tokens out. It owns the model and the KV cache."""

import mmap
import os
from importlib.util import find_spec
from pathlib import Path

import torch

from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.layers.attention import Batch
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
        checkpoint = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
        return torch.float16 if str(checkpoint).endswith("float16") and "b" not in str(checkpoint) else torch.bfloat16
    in_hardware = torch.cpu._is_avx512_bf16_supported() and config.model != EMBEDDED_MODEL
    return torch.bfloat16 if in_hardware else torch.float32


class ModelRunner:
    def __init__(self, config: Config, hf_config, path: Path, device: torch.device):
        self.device = device
        self.dtype = choose_dtype(config, hf_config, self.device)
        self.block_size = config.block_size
        self.use_triton = config.attention_backend == "triton"
        can_run = find_spec("triton") and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
        if self.use_triton and not can_run:
            raise ValueError(
                "attention_backend='triton' is not allowed: it needs a GPU, or TRITON_INTERPRET=1 on Linux"
            )
        self.vocab_size = hf_config.vocab_size
        self.model = load_model(path, hf_config, config.max_model_len, self.dtype, self.device)
        self.num_layers = hf_config.num_hidden_layers
        self.block_shape = (config.block_size, hf_config.num_key_value_heads, head_dim_of(hf_config))
        self.num_blocks = config.num_blocks or self._num_blocks_that_fit(config)
        self.kv_cache = self._new_kv_cache(self.num_blocks)

    def _new_kv_cache(self, num_blocks: int) -> torch.Tensor:
        """Zeros, so that whoever reads a slot that nobody wrote makes the same mistake every time."""
        shape = (2, self.num_layers, num_blocks, *self.block_shape)
        if self.device.type == "cpu":  # anonymous pages are zero and take no memory before they are touched
            buffer = mmap.mmap(-1, torch.Size(shape).numel() * self.dtype.itemsize)
            return torch.frombuffer(buffer, dtype=self.dtype).view(shape)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _num_blocks_that_fit(self, config: Config) -> int:
        """The memory that the model leaves is cut into blocks."""
        block_bytes = 2 * self.num_layers * torch.Size(self.block_shape).numel() * self.dtype.itemsize
        if self.device.type == "cpu":
            available = int(config.kv_cache_gib * 2**30)
        else:
            torch.cuda.reset_peak_memory_stats(self.device)
            self._profile(config)
            free, total = torch.cuda.mem_get_info(self.device)
            others = total - free - torch.cuda.memory_reserved(self.device)  # other processes, CUDA's own context
            peak = torch.cuda.max_memory_allocated(self.device)
            available = int(total * config.gpu_memory_utilization) - others - peak
        useful = config.max_num_seqs * -(-config.max_model_len // config.block_size)
        num_blocks = min(available // block_bytes, useful)
        if num_blocks < 1:
            raise ValueError(
                f"no memory is left for a KV block of {block_bytes:,} bytes: {available:,} bytes are available"
            )
        return num_blocks

    def _profile(self, config: Config) -> None:
        """Runs the largest step there can be, on a cache of one block, to learn what activations take."""
        num_tokens = config.max_num_batched_tokens
        num_seqs = max(min(config.max_num_seqs, num_tokens), -(-num_tokens // config.max_model_len))
        length = num_tokens // num_seqs
        requests = [Request(None, None, [0] * length, SamplingParams()) for _ in range(num_seqs)]
        for request in requests:
            request.sequences[0].block_table = [0] * -(-length // self.block_size)
        self.kv_cache = self._new_kv_cache(1)
        self.run(Schedule([(request.sequences[0], length) for request in requests]))
        self.kv_cache = None

    @torch.inference_mode()
    def run(self, schedule: Schedule) -> tuple[list[int], list[dict[int, float] | None]]:
        """Computes a step. For each of `schedule.sampled`: a token, and its log-probabilities if asked for."""
        input_ids, positions, last, batch = self._prepare(schedule)
        hidden = self.model(input_ids, positions, batch)
        sampled = schedule.sampled
        if not sampled:
            return [], []
        logits = self.model.logits(hidden[last])
        token_ids = sample(logits, self._sampling(sampled))
        return token_ids.tolist(), self._logprobs(logits, token_ids, sampled)

    def _prepare(self, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Batch]:
        """One flat, ragged batch: input ids, positions, indices of the tokens that are sampled from, metadata."""
        input_ids, positions, owners, ends, contexts, last = [], [], [], [], [], []
        for b, (seq, num_tokens) in enumerate(schedule.items):
            start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
            input_ids += seq.token_ids[start:end]
            positions += range(start, end)
            owners += [b] * num_tokens
            ends.append(len(input_ids))
            contexts.append(end)
            if end == len(seq):
                last.append(len(input_ids) - 1)
        tables = [seq.block_table for seq, _ in schedule.items]
        width = max(map(len, tables))
        block_tables = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
        positions = torch.tensor(positions)
        block_ids = block_tables[torch.tensor(owners), positions // self.block_size]
        batch = Batch(
            kv_cache=self.kv_cache,
            slot_mapping=(block_ids.long() * self.block_size + positions % self.block_size).to(self.device),
            cu_seqlens_q=torch.tensor([0, *ends], dtype=torch.int32, device=self.device),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=self.device),
            block_tables=block_tables.to(self.device),
            use_triton=self.use_triton,
        )
        return (
            torch.tensor(input_ids, device=self.device),
            positions.to(self.device),
            torch.tensor(last, device=self.device),
            batch,
        )

    def _sampling(self, seqs: list[Sequence]) -> Sampling | None:
        params = [seq.request.params for seq in seqs]
        drawn = [p for p in params if p.temperature > 0]
        if not drawn:
            return None
        top_k = [p.top_k if p.top_k > 0 else self.vocab_size for p in params]
        limit = max(k for k, p in zip(top_k, params) if p.temperature > 0)
        floats = torch.tensor([[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]])
        integers = torch.tensor([[seq.seed for seq in seqs], [len(seq) for seq in seqs], top_k])
        temperature, top_p, min_p = floats.to(self.device)
        seed, position, top_k = integers.to(self.device)
        return Sampling(
            temperature=temperature,
            seed=seed,
            position=position,
            top_k=top_k if any(p.top_k > 0 for p in drawn) else None,
            top_p=top_p if any(p.top_p < 1 for p in drawn) else None,
            min_p=min_p if any(p.min_p > 0 for p in drawn) else None,
            max_top_k=limit if limit < self.vocab_size else None,
        )

    def _logprobs(self, logits, token_ids, seqs: list[Sequence]) -> list[dict[int, float] | None]:
        wanted = [seq.request.params.logprobs for seq in seqs]
        if all(k is None for k in wanted):
            return [None] * len(seqs)
        values, ids = top_logprobs(logits, token_ids, max(k for k in wanted if k is not None))
        rows = zip(wanted, ids.tolist(), values.tolist())
        return [None if k is None else dict(zip(i[: k + 1], v[: k + 1])) for k, i, v in rows]
