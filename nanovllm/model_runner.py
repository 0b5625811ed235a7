"""ModelRunner: a schedule in, sampled tokens out. It owns the model and the KV cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.config import Config, Limits
from nanovllm.device.caches import Caches, choose_shape
from nanovllm.device.choose import choose_dtype, choose_ops
from nanovllm.device.heap import keep_freed_memory
from nanovllm.device.onednn import convert
from nanovllm.device.threads import Threads
from nanovllm.layers.batch import Batch
from nanovllm.layers.sampler import top_logprobs
from nanovllm.loader import is_quantized, load_model
from nanovllm.models.dense import DenseModel
from nanovllm.schedule import Drawn, Schedule
from nanovllm.sequence import TokenLogprobs
from nanovllm.step import Recorder, StepInputs, integers, sampling_of

if TYPE_CHECKING:
    from nanovllm.topics.decoding.prompt_logprobs import PromptScores

NO_TOKEN = -1  # in place of a token id: the row of logits is not finite


class Runner(Protocol):
    """Executes schedules: ModelRunner on one device, topics/parallel/runner.py on several."""

    num_blocks: int
    num_host_blocks: int
    is_asynchronous: bool  # whether `launch` returns before the step is computed

    def launch(self, schedule: Schedule) -> Callable[[], Drawn]:
        """Starts a step. The returned function waits for its end."""

    def close(self) -> None:
        """Frees what the runner holds. It launches no step afterwards."""


class ModelRunner:
    """Runs the model. A step is `prepare`, `forward`, `sample`: see `launch`."""

    def __init__(
        self,
        config: Config,
        limits: Limits,
        hf_config,
        path: Path,
        device: torch.device,
        draft=None,
    ):
        self.draft: ModelRunner | None = draft  # of a draft model, with as many blocks (chapter 22)
        self.device = device
        self.limits = limits
        self.is_asynchronous = device.type == "cuda"
        self.threads: Threads | None = None
        if device.type == "cpu":
            keep_freed_memory()
            self.threads = Threads()
        self.dtype = choose_dtype(config, hf_config, device)
        self.ops = choose_ops(config, device, self.dtype)
        self.vocab_size = hf_config.vocab_size
        quantize = None
        if config.quantization or is_quantized(hf_config):
            from nanovllm.topics.quantization.layers import quantizer  # chapter 21

            quantize = quantizer(config, hf_config, self.ops)
        form = partial(convert, quantize=quantize, product=self.ops.product_for(self.dtype))
        self.model = self.load(path, hf_config, form)
        self.weights_per_layer = sum(w.numel() for w in self.model.model.layers[0].parameters())
        self.shape = choose_shape(config, limits, self.model, self.dtype, device)
        self.block_bytes = self.shape.block_bytes + (draft.block_bytes if draft else 0)
        self.num_host_blocks = config.num_host_blocks(self.block_bytes, limits)
        self.last_token_ids: Tensor | None = None  # that the last step drew, on the device
        self.recorder: Recorder | None = None
        with self.on_device(0):
            self.num_blocks = config.num_blocks or self._num_blocks_that_fit(config)
            self.start(self.num_blocks, self.num_host_blocks, config.enforce_eager)
            when = {"always", "cuda"} if self.is_asynchronous else {"always"}
            if config.check_kernels in when:
                from nanovllm.topics.checks.kernels import check_kernels  # chapter 10

                check_kernels(self)

    def start(self, num_blocks: int, num_host_blocks: int, is_eager: bool) -> None:
        """Allocates the KV cache, compiles the kernels, and records steps unless `is_eager`."""
        self.allocate(num_blocks, num_host_blocks)
        if self.is_asynchronous or self.ops.COMPILES_AT_FIRST_USE:
            self.warm_up()
        self.recorder = None if is_eager else self.new_recorder()
        if self.recorder is not None:
            for size in reversed(self.recorder.sizes):
                self.recorder.record(size)
        if self.draft is not None:
            self.draft.start(num_blocks, num_host_blocks, is_eager)

    def load(self, path: Path, hf_config, *options) -> DenseModel:
        longest = self.limits.max_model_len
        return load_model(path, hf_config, longest, self.dtype, self.device, self.ops, *options)

    def on_device(self, num_tokens: int) -> AbstractContextManager:
        """A context in which a step with `num_tokens` tokens runs on the right device."""
        if self.threads is None:
            # Triton launches on the thread's current device, which may be another GPU
            return torch.cuda.device(self.device)
        return self.threads.of_step(num_tokens * self.weights_per_layer)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        self.caches = Caches(self.shape, num_blocks, num_host_blocks, self.device)
        self.kv_cache = self.caches.on_device

    def new_recorder(self) -> Recorder | None:
        return self.ops.recorder(self.model, self.kv_cache, self.limits)

    def _num_blocks_that_fit(self, config: Config) -> int:
        available = int(config.kv_cache_gib * 2**30) - self.shape.state_bytes
        if self.device.type == "cuda":
            from nanovllm.device.memory import memory_left  # chapter 12

            available = memory_left(self, config)
        return config.num_blocks_in(available, self.block_bytes, self.limits)

    def warm_up(self) -> None:
        """Compiles all kernels, so that no request waits for a compilation."""
        from nanovllm.device.memory import warm_up_steps

        for schedule in warm_up_steps(self.device, self.limits, self.shape.block_size, self.dtype):
            self.launch(schedule)

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> Callable[[], Drawn]:
        """Starts a step, and does not wait for the device.

        The returned function waits. It returns a token for each of `schedule.sampled`, and
        log-probabilities if a request wants them.
        """
        with self.on_device(schedule.num_tokens):
            hidden, inputs = self.forward(self.prepare(schedule))
            return self.sample(hidden, inputs, schedule)

    def close(self) -> None:
        """Frees the memory."""
        if self.draft is not None:
            self.draft.close()
        del self.model, self.caches, self.kv_cache, self.recorder
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- a schedule becomes tensors, on the host ---

    def prepare(self, schedule: Schedule) -> StepInputs:
        """One flat, ragged batch. Decodes come first.

        For example, two sequences with blocks of 4 tokens, the first with 4 tokens in the cache and
        1 to compute, the second with none in the cache and 3 to compute:

            counts         [1, 3]          tokens to compute
            starts         [4, 0]          tokens in the cache before ...
            contexts       [5, 3]          ... and after the step
            ends           [1, 4]          where each sequence ends in the batch
            seq_of_token   [0, 1, 1, 1]
            positions      [4, 0, 1, 2]
            block_tables   [7, 2, 5]       that of the first, then that of the second ...
            cu_blocks      [0, 2, 3]       ... which begins at 2
            slots          [8, 20, 21, 22]  block 2, offset 0, then block 5
            sampled_rows   [0, 3]          where the last tokens are

        Block tables are whole. A sequence's drafts share the rows of its longest draft: one that is
        k tokens shorter uses the row k before the last. See Schedule.sampled.
        """
        items = sorted(schedule.items, key=lambda item: item.num_tokens > 1)  # decodes first
        token_ids = array("q")
        all_tables = array("i")
        table_ends = array("i", [0])
        for seq, start, num_tokens in items:
            token_ids.fromlist(seq.token_ids[start : start + num_tokens])
            all_tables.fromlist(seq.block_table)
            table_ends.append(len(all_tables))
        block_tables = torch.frombuffer(all_tables, dtype=torch.int32)
        cu_blocks = torch.frombuffer(table_ends, dtype=torch.int32)

        counts = integers([item.num_tokens for item in items])
        starts = integers([item.start for item in items])
        contexts = starts + counts
        ends = counts.cumsum(0)
        seq_of_token = torch.repeat_interleave(counts)
        positions = torch.arange(len(token_ids)) + (contexts - ends)[seq_of_token]
        block_size = self.kv_cache.block_size
        block_ids = block_tables[cu_blocks[seq_of_token] + positions // block_size]
        state_slots = None
        if self.kv_cache.states:
            state_slots = integers([item.seq.state_slot for item in items])
        batch = Batch(
            kv_cache=self.kv_cache,
            slot_mapping=self.kv_cache.slots(block_ids, positions % block_size),
            cu_seqlens_q=F.pad(ends, (1, 0)).int(),
            context_lens=contexts.int(),
            cu_blocks=cu_blocks,
            state_slots=state_slots,
            block_tables=block_tables,
            num_decodes=int((counts == 1).sum()),
        )
        sampling = None
        if not all(seq.request.is_greedy for seq in schedule.sampled):
            sampling = sampling_of(schedule.sampled, self.vocab_size)
        end_of = {item.seq: end for item, end in zip(items, ends.tolist())}
        # each draft token that `last` has beyond `seq` takes one row behind the row of `seq`
        rows = [
            end_of[last] - 1 - (len(last.token_ids) - len(seq.token_ids))
            for seq, last in schedule.sampled.items()
        ]
        sampled_rows = integers(rows)
        if schedule.scored:
            from nanovllm.topics.decoding.prompt_logprobs import rows_to_score  # chapter 08

            sampled_rows = torch.cat([sampled_rows, rows_to_score(schedule.scored, end_of)])
        input_ids = torch.frombuffer(token_ids, dtype=torch.int64)
        step = StepInputs(input_ids, positions, batch, sampled_rows, sampling, schedule.moves)
        if input_ids.lt(0).any():
            step.last_token_ids = self.last_token_ids
        return step

    # --- tensors become hidden states, on the device ---

    def forward(self, inputs: StepInputs) -> tuple[Tensor, StepInputs]:
        """Hidden states [T, hidden_size], and the inputs as they were computed.

        The inputs are on the device, and padded if a graph was replayed. The inputs hold everything
        that a step needs, so another rank may run this method, too.
        """
        if inputs.moves:
            self.caches.move(inputs.moves, self.ops)
        size = self.recorder.size_for(inputs) if self.recorder is not None else None
        if self.recorder is not None and size is not None:
            replayed = self.recorder.run(inputs, size)
            if self.threads is not None:
                self.threads.finish_alone()
            return replayed
        if self.device.type != "cpu":
            inputs = inputs.to(self.device)
        inputs.fill_in_pending()
        inputs.batch.layout = self.ops.layout(inputs.batch)
        hidden = self.model(inputs.input_ids, inputs.positions, inputs.batch)
        return hidden, inputs

    # --- hidden states become tokens ---

    def sample(self, hidden: Tensor, inputs: StepInputs, schedule: Schedule) -> Callable[[], Drawn]:
        """Samples a token for each of `schedule.sampled`. See `launch`."""
        seqs = [*schedule.sampled]
        hidden = hidden[inputs.sampled_rows]
        results: list[Tensor] = []
        wanted = [seq.request.num_logprobs for seq in seqs]
        if seqs:
            if inputs.logits is None:
                logits = self.model.lm_head(hidden[: len(seqs)])
            else:
                logits = inputs.logits[: len(seqs)]
            if inputs.sampling is None:
                # the first of equal logits, like argmax, which is four times as slow on a CPU
                highest, token_ids = logits.max(-1)
            else:
                highest = logits.amax(-1)
                adjusted = logits
                if any(seq.request.rules is not None for seq in seqs):
                    from nanovllm.topics.decoding.penalties import adjusted_logits  # chapter 08

                    adjusted = adjusted_logits(logits, seqs)
                token_ids = self.ops.sample(adjusted, inputs.sampling)
            self.last_token_ids = token_ids.where(highest.isfinite(), NO_TOKEN)
            results = [self.last_token_ids]
            if any(k is not None for k in wanted):
                most = max(k for k in wanted if k is not None)
                values, ids = top_logprobs(logits, token_ids, min(most, self.vocab_size))
                results += [ids, values]
        scores = None
        if schedule.scored:
            from nanovllm.topics.decoding.prompt_logprobs import PromptScores  # chapter 08

            scores = PromptScores(schedule.scored, hidden[len(seqs) :], self.model.lm_head)
        arrived = None
        if self.device.type == "cuda":
            results, arrived = on_the_way(results)
        return partial(collect, results, arrived, wanted, scores)


def on_the_way(results: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
    """Copies the results to the host right behind the step, so that reading them does not wait for
    what is launched later. They are there once the event has happened."""
    copies = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in results]
    for copy, one in zip(copies, results):
        copy.copy_(one, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return copies, arrived


def collect(
    results: list[Tensor],
    arrived: torch.cuda.Event | None,
    wanted: list[int | None],
    scores: PromptScores | None,
) -> Drawn:
    """Waits for the results of `sample`. Each sequence gets the log-probability of its token, and
    those of as many of the most likely tokens as it wants."""
    if arrived is not None:
        arrived.synchronize()
    if scores is not None:
        scores.deliver()
    if not results:
        return [], None
    token_ids = results[0].tolist()
    if NO_TOKEN in token_ids:  # Recovery runs the step's requests one by one to find the cause
        raise FloatingPointError("logits are NaN or infinite: wrong weights, or too small a dtype")
    if len(results) == 1:
        return token_ids, None
    logprobs: list[TokenLogprobs | None] = []
    for k, ids, values in zip(wanted, results[1].tolist(), results[2].tolist()):
        if k is None:
            logprobs.append(None)
        else:  # the token itself, then the k likeliest
            logprobs.append(dict(zip(ids[: k + 1], values[: k + 1])))
    return token_ids, logprobs
