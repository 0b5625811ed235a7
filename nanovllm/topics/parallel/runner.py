"""Tensor parallelism: a model runner whose layers are split over several ranks. Rank 0 has the
whole engine. In each step it sends the others one message (vLLM paper, section 4.6), all ranks run
the model, and rank 0 samples."""

from __future__ import annotations

import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.block_manager import Moves
from nanovllm.config import Config, Limits
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.loader import has_states, load_config
from nanovllm.model_runner import Drawn, ModelRunner
from nanovllm.models.dense import DenseModel
from nanovllm.options import refusal
from nanovllm.recovery import RankError
from nanovllm.schedule import Schedule
from nanovllm.step import StepInputs, integers
from nanovllm.topics.decoding.prompt_logprobs import ROWS_AT_A_TIME
from nanovllm.topics.parallel.ranks import (
    Group,
    device_of,
    start,
    started,
    started_by_torchrun,
)
from nanovllm.topics.parallel.shards import Shard
from nanovllm.topics.parallel.watch import LOST, SECONDS_BETWEEN_BEATS, repeat

FIRST = 2**11  # numbers of a step in one message; more of them need a second one
NUM_PARTS = 14  # of a message, without their lengths


# --- a step, packed ---


def packed(step: StepInputs, num_drawn: int) -> Tensor:
    """A step as one tensor, with all that the other ranks need: int64 [at least FIRST]. It begins
    with the lengths of the parts that follow. Of the rows that are sampled from, the first
    `num_drawn` draw a token; the others are of prompts to score."""
    batch = step.batch
    moves = step.moves
    pairs = (moves.swaps_out.items(), moves.swaps_in.items(), moves.copies, moves.state_copies)
    parts = [
        integers([num_drawn, batch.num_decodes]),
        step.input_ids,
        step.positions,
        batch.slot_mapping,
        step.sampled_rows,
        *[integers(chain.from_iterable(each)) for each in pairs],
        batch.cu_seqlens_q,
        batch.context_lens,
        batch.cu_blocks,
        batch.block_tables,
        integers([]) if batch.state_slots is None else batch.state_slots,
    ]
    message = torch.cat([integers(map(len, parts)), *parts])
    return F.pad(message, [0, max(0, FIRST - len(message))])


def sizes_of(message: Tensor) -> list[int]:
    """The lengths of the parts of a message, given its start. The first part is these lengths."""
    return [NUM_PARTS, *message[:NUM_PARTS].tolist()]


def unpacked(message: Tensor, kv_cache: KVCache) -> tuple[StepInputs, int]:
    """The step of a message, and how many of its rows draw a token."""
    sizes = sizes_of(message)
    parts = message[: sum(sizes)].split(sizes)
    _, counts, input_ids, positions, slot_mapping, sampled_rows, *rest = parts
    num_drawn, num_decodes = counts.tolist()
    swaps_out, swaps_in, *copies = [pairs.view(-1, 2).tolist() for pairs in rest[:4]]
    cu_seqlens_q, context_lens, cu_blocks, block_tables, state_slots = rest[4:]
    batch = Batch(
        kv_cache,
        slot_mapping,
        cu_seqlens_q.int(),
        context_lens.int(),
        cu_blocks.int(),
        block_tables.int(),
        num_decodes,
        state_slots=state_slots if len(state_slots) else None,
    )
    moves = Moves(dict(swaps_out), dict(swaps_in), *copies)
    return StepInputs(input_ids, positions, batch, sampled_rows, moves=moves), num_drawn


# --- runners ---


def shard_of(config, rank: int, size: int) -> Shard:
    """A rank's part of a model of any family."""
    if has_states(config):
        from nanovllm.topics.parallel.hybrid import HybridShard  # chapter 23

        return HybridShard(config, rank, size)
    return Shard(config, rank, size)


class RankRunner(ModelRunner):
    """The model runner of any rank, with its shard of the model."""

    def __init__(self, group: Group, *args):
        self.group = group
        super().__init__(*args)
        group.meet("ready")

    def __del__(self) -> None:
        self.recorder = None  # before the process group, which might wait for them

    def load(self, path: Path, hf_config, *options) -> DenseModel:
        shard = shard_of(hf_config, self.group.rank, self.group.size)
        model = super().load(path, shard.config, *options, shard.read)
        shard.join(model, self.group, hf_config.vocab_size)
        self.group.meet("loaded")
        return model

    def _num_blocks_that_fit(self, config: Config) -> int:
        return self.group.least(super()._num_blocks_that_fit(config))


class Leader(RankRunner):
    """Rank 0: sends each step to the others, and samples."""

    is_ready = False  # until then, all ranks run the same steps by themselves

    def __init__(self, *args):
        super().__init__(*args)
        self.is_ready = True

    def launch(self, schedule: Schedule) -> Callable[[], Drawn]:
        self.num_drawn = len(schedule.sampled)
        with self.group.watch.step():
            collect = super().launch(schedule)
        return partial(self.collect, collect)

    def collect(self, collect: Callable[[], Drawn]) -> Drawn:
        """On a GPU, rank 0 waits here."""
        with self.group.watch.step():
            return collect()

    def close(self) -> None:
        super().close()
        with suppress(RankError), self.group.watch.step():
            end_steps(self.group)
        self.group.watch.end = "the engine is closed"
        self.group.close()

    def forward(self, inputs: StepInputs) -> tuple[Tensor, StepInputs]:
        if not self.is_ready:
            return super().forward(inputs)
        message = packed(inputs, self.num_drawn)
        self.group.tell(message[:FIRST])
        if len(message) > FIRST:
            self.group.tell(message[FIRST:])
        try:
            return super().forward(inputs)
        except BaseException as error:  # the others are somewhere in the middle of the step
            self.group.watch.give_up(f"rank 0 has failed within a step: {error!r}")
            raise

    def sample(self, hidden: Tensor, inputs: StepInputs, schedule: Schedule) -> Callable[[], Drawn]:
        before = self.group.num_gathered
        try:
            return super().sample(hidden, inputs, schedule)
        except BaseException:  # the others are at their logits: the next step finds them ready
            parts = rows_of_logits(hidden[inputs.sampled_rows], len(schedule.sampled))
            for rows in parts[self.group.num_gathered - before :]:
                self.model.lm_head(rows)
            raise


class Follower(RankRunner):
    """Any rank but rank 0."""

    def sample(self, hidden: Tensor, inputs: StepInputs, schedule: Schedule) -> Callable[[], Drawn]:
        """Takes part in the steps before the first request."""
        self.give_logits(hidden, inputs, len(schedule.sampled))
        return lambda: ([], None)

    def give_logits(self, hidden: Tensor, inputs: StepInputs, num_drawn: int) -> None:
        for rows in rows_of_logits(hidden[inputs.sampled_rows], num_drawn):
            self.model.lm_head(rows)

    @torch.inference_mode()
    def follow(self) -> None:
        """Computes what rank 0 tells, until it says that this is all."""
        while True:
            message = torch.empty(FIRST, dtype=torch.int64)
            self.group.tell(message)
            if not message.any():  # there are no more steps
                return
            length = sum(sizes_of(message))
            if length > FIRST:
                rest = torch.empty(length - FIRST, dtype=torch.int64)
                self.group.tell(rest)
                message = torch.cat([message, rest])
            step, num_drawn = unpacked(message, self.kv_cache)
            with self.on_device(len(step.input_ids)):
                hidden, step = self.forward(step)
                self.give_logits(hidden, step, num_drawn)


def end_steps(group: Group) -> None:
    """Lets the others return from `follow`."""
    with suppress(RankError):  # they have ended already
        group.tell(torch.zeros(FIRST, dtype=torch.int64))


def rows_of_logits(hidden: Tensor, num_drawn: int) -> list[Tensor]:
    """The rows that ModelRunner.sample gives to the language-model head: first the rows to sample
    from, then the rows to score."""
    parts = [hidden[:num_drawn], *hidden[num_drawn:].split(ROWS_AT_A_TIME)]
    return [part for part in parts if len(part)]


# --- from a config to the ranks ---


def new_runner(
    config: Config, limits: Limits, hf_config, path: Path, device: torch.device
) -> ModelRunner:
    """The runner of rank 0. In another rank that torchrun has started, this follows rank 0 and then
    ends the process."""
    size = config.tensor_parallel_size
    shard_of(hf_config, 0, size)  # can it be divided?
    if not hasattr(os, "register_at_fork"):
        raise refusal("tensor_parallel_size", size, "ranks run on Linux and macOS only")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        group = started_by_torchrun(size, config.rank_timeout)
        device = device_of(config, device, int(os.environ.get("LOCAL_RANK", 0)), 1)
    else:
        device = device_of(config, device, 0, size)
        fields = asdict(config) | {"model": str(path), "scheduler_cls": None}
        fields |= {"block_manager_cls": None, "device": device.type}
        settings = {"config": fields, "limits": asdict(limits)}
        group = start(settings, size, config.rank_timeout)
    arguments = (config, limits, hf_config, path, device)
    if group.rank:
        follow(group, *arguments)
        sys.exit(0)
    group.connect(device)
    leader = Leader(group, *arguments)
    weakref.finalize(leader, end_steps, group)
    return leader


def follow(group: Group, *arguments) -> None:
    """A whole life as another rank."""
    end_beats = repeat(
        SECONDS_BETWEEN_BEATS, partial(group.watch.store.add, f"beat/{group.rank}", 1)
    )
    try:
        group.connect(arguments[-1])
        Follower(group, *arguments).follow()
    except RankError:
        os._exit(LOST)  # rank 0 finds the reason
    except BaseException:
        group.store.set(f"died/{group.rank}", traceback.format_exc(limit=-2)[-1000:])
        raise
    finally:
        end_beats()


def main() -> None:
    """The process of a rank that rank 0 has started."""
    settings = json.loads(sys.stdin.readline())
    group = started(settings)
    config = Config(**settings["config"])
    path = Path(config.model)
    device = torch.device("cpu") if config.device == "cpu" else torch.device("cuda", group.rank)
    follow(group, config, Limits(**settings["limits"]), load_config(path), path, device)
    os._exit(0)
