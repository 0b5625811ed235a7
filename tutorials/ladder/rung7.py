"""Rung 7: an engine in one file. Text in and out, chunks, shared prefixes, preemption, seeds.

It imports nothing of nanovllm, and its names are those of the same things there. Read it from the
top: what a user calls, the plan of a step, blocks, tensors, the model, attention, the next token.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer


@dataclass
class SamplingParams:
    temperature: float = 1.0  # 0 is greedy
    max_tokens: int = 256
    ignore_eos: bool = False
    seed: int = 0  # equal prompts with equal seeds get equal answers


class CompletionOutput(NamedTuple):
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop" or "length"


@dataclass(eq=False)
class Sequence:
    """A request. The first `num_computed_tokens` of its tokens have keys and values in the cache,
    token i in block `block_table[i // block_size]`. A step computes some of the other tokens."""

    prompt_token_ids: list[int]
    params: SamplingParams
    max_len: int  # of all its tokens
    token_ids: list[int]
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    prefix_ids: list[int] = field(default_factory=list)  # of its full blocks
    finish_reason: str | None = None


class LLM:
    def __init__(self, model: str, num_blocks: int = 64, block_size: int = 16, **limits: int):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.runner = ModelRunner(Path(model), num_blocks, block_size)
        self.block_manager = BlockManager(num_blocks, block_size)
        eos = json.loads((Path(model) / "generation_config.json").read_bytes())["eos_token_id"]
        eos_token_ids = eos if isinstance(eos, list) else [eos]
        self.scheduler = Scheduler(self.block_manager, eos_token_ids, **limits)

    def add_request(self, prompt: str | list[int], params: SamplingParams) -> Sequence:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        max_len = min(len(token_ids) + params.max_tokens, len(self.runner.model.rope))
        assert 0 < len(token_ids) < max_len, "an empty or too long prompt, or max_tokens below 1"
        seq = Sequence(token_ids, params, max_len, [*token_ids])
        self.scheduler.waiting.append(seq)
        return seq

    def step(self) -> None:
        schedule = self.scheduler.schedule()
        assert schedule.items, "the first request does not fit: more blocks are needed"
        token_ids = self.runner.launch(schedule)
        self.scheduler.update(schedule, token_ids)

    def generate(self, prompts, sampling_params) -> list[CompletionOutput]:
        """Answers all prompts, texts or token ids, each with its own parameters."""
        seqs = [self.add_request(*pair) for pair in zip(prompts, sampling_params, strict=True)]
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
        return [self.final_output(seq) for seq in seqs]

    def final_output(self, seq: Sequence) -> CompletionOutput:
        token_ids = seq.token_ids[len(seq.prompt_token_ids) :]
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return CompletionOutput(text, token_ids, seq.finish_reason)


# --- the plan of a step ---


class Item(NamedTuple):
    seq: Sequence
    start: int  # the first token that the step computes
    num_tokens: int


@dataclass
class Schedule:
    tokens_left: int  # of the budget
    items: list[Item] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)  # those that get a token

    def next_tokens(self, seq: Sequence) -> Item:
        """The missing tokens of a sequence, as many as the budget allows."""
        num_missing = len(seq.token_ids) - seq.num_computed_tokens
        return Item(seq, seq.num_computed_tokens, min(num_missing, self.tokens_left))


@dataclass
class Scheduler:
    """First come, first served: `running`, then `waiting`, are in the order of arrival."""

    block_manager: BlockManager
    eos_token_ids: list[int]
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 384
    watermark: float = 0.05  # the part of the blocks that admission leaves free: answers grow
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)

    def schedule(self) -> Schedule:
        schedule = Schedule(self.max_num_batched_tokens)
        num_running = len(self.running)
        self.schedule_running(schedule)
        if len(self.running) == num_running:  # otherwise one was preempted: there is no room
            self.schedule_waiting(schedule)
        return schedule

    def schedule_running(self, schedule: Schedule) -> None:
        """Gives running sequences their missing tokens. If blocks run out, the last gives way."""
        for seq in [*self.running]:
            item = schedule.next_tokens(seq)
            while seq in self.running and not self.block_manager.can_allocate(item):
                self.preempt(self.running[-1])
            if seq in self.running and item.num_tokens > 0:
                self.commit(item, schedule)

    def schedule_waiting(self, schedule: Schedule) -> None:
        while self.waiting and schedule.tokens_left > 0 and self._fits(self.waiting[0]):
            seq = self.waiting.pop(0)
            self.admit(seq)
            self.commit(schedule.next_tokens(seq), schedule)

    def _fits(self, seq: Sequence) -> bool:
        spare = int(self.watermark * len(self.block_manager.blocks)) if self.running else 0
        return len(self.running) < self.max_num_seqs and self.block_manager.can_admit(seq, spare)

    def admit(self, seq: Sequence) -> None:
        """Takes what the cache has, and blocks for all other tokens: they may come in chunks."""
        self.running.append(seq)
        self.block_manager.take_prefix(seq)
        self.block_manager.allocate(seq, len(seq.token_ids))

    def commit(self, item: Item, schedule: Schedule) -> None:
        seq, start, num_tokens = item
        self.block_manager.allocate(seq, start + num_tokens)
        self.block_manager.cache_full_blocks(seq, start + num_tokens)
        schedule.items.append(item)
        schedule.tokens_left -= num_tokens
        if start + num_tokens == len(seq.token_ids):
            schedule.sampled.append(seq)

    def preempt(self, seq: Sequence) -> None:
        """Takes its blocks. It keeps its tokens, and computes them again when it is admitted."""
        self.running.remove(seq)
        self.block_manager.free(seq)
        self.waiting.insert(0, seq)

    def update(self, schedule: Schedule, token_ids: list[int]) -> None:
        for seq, start, num_tokens in schedule.items:
            seq.num_computed_tokens = start + num_tokens
        for seq, token_id in zip(schedule.sampled, token_ids, strict=True):
            seq.token_ids.append(token_id)
            if token_id in self.eos_token_ids and not seq.params.ignore_eos:
                self.finish(seq, "stop")
            elif len(seq.token_ids) == seq.max_len:
                self.finish(seq, "length")

    def finish(self, seq: Sequence, reason: str) -> None:
        seq.finish_reason = reason
        self.running.remove(seq)
        self.block_manager.free(seq)


# --- blocks ---


@dataclass
class Block:
    id: int
    ref_count: int = 0
    key: tuple | None = None  # if cached: the identity of the prefix before it, and its tokens
    prefix_id: int = 0  # the identity of the prefix that ends with it


class BlockManager:
    """A block has owners, or is free. A free one keeps what it holds until it is taken."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_blocks = OrderedDict.fromkeys(range(num_blocks))  # the first is taken next
        self.cached_blocks: dict[tuple, Block] = {}  # by key
        self.prefix_ids = count(1)  # 0 is the empty prefix

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_allocate(self, item: Item) -> bool:
        needed = self.num_blocks_for(item.start + item.num_tokens) - len(item.seq.block_table)
        return needed <= len(self.free_blocks)

    def can_admit(self, seq: Sequence, num_reserved: int) -> bool:
        num_in_use = sum(block.ref_count > 0 for block in self.find_prefix(seq))
        needed = self.num_blocks_for(len(seq.token_ids)) - num_in_use + num_reserved
        return needed <= len(self.free_blocks)

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The cached blocks of its longest prefix. The last token is computed: for its logits."""
        blocks: list[Block] = []
        for begin in range(0, len(seq.token_ids) - self.block_size, self.block_size):
            prefix_id = blocks[-1].prefix_id if blocks else 0
            token_ids = tuple(seq.token_ids[begin : begin + self.block_size])
            block = self.cached_blocks.get((prefix_id, token_ids))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take_prefix(self, seq: Sequence) -> None:
        for block in self.find_prefix(seq):
            self.free_blocks.pop(block.id, None)
            block.ref_count += 1
            seq.block_table.append(block.id)
            seq.prefix_ids.append(block.prefix_id)
        seq.num_computed_tokens = len(seq.block_table) * self.block_size

    def allocate(self, seq: Sequence, num_tokens: int) -> None:
        while len(seq.block_table) < self.num_blocks_for(num_tokens):
            seq.block_table.append(self.take_block().id)

    def take_block(self) -> Block:
        block = self.blocks[self.free_blocks.popitem(last=False)[0]]
        if block.key is not None:  # from now on it is not found any more
            del self.cached_blocks[block.key]
            block.key = None
        block.ref_count = 1
        return block

    def cache_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Others find them from now on, even in this step: a layer stores all keys, then reads."""
        for i in range(len(seq.prefix_ids), num_tokens // self.block_size):
            token_ids = tuple(seq.token_ids[i * self.block_size : (i + 1) * self.block_size])
            key = (seq.prefix_ids[-1] if seq.prefix_ids else 0, token_ids)
            if key not in self.cached_blocks:
                block = self.blocks[seq.block_table[i]]
                block.key = key
                block.prefix_id = next(self.prefix_ids)
                self.cached_blocks[key] = block
            seq.prefix_ids.append(self.cached_blocks[key].prefix_id)

    def free(self, seq: Sequence) -> None:
        """The last block first, so that an end is lost before the prefix that it follows."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_blocks[block_id] = None
                if block.key is None:  # it cannot be found: it is taken before all others
                    self.free_blocks.move_to_end(block_id, last=False)
        seq.num_computed_tokens = 0
        seq.block_table, seq.prefix_ids = [], []


# --- a plan becomes tensors ---


class Batch(NamedTuple):
    """What attention reads about T new tokens."""

    kv_cache: Tensor  # [2, layers, slots, kv_heads, head_dim]
    slot_mapping: Tensor  # [T]: where the key and the value of each new token go
    layout: list[tuple[Tensor, Tensor]]  # of each sequence: slots of its keys, which a token sees


class ModelRunner:
    def __init__(self, path: Path, num_blocks: int, block_size: int):
        self.model = model = DenseModel(path)
        self.block_size = block_size
        self.kv_cache = torch.zeros(2, model.num_layers, num_blocks * block_size, *model.kv_sizes)

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> list[int]:
        input_ids, positions, batch, sampled_rows = self.prepare(schedule)
        hidden = self.model.forward(input_ids, positions, batch)
        logits = self.model.lm_head(hidden[sampled_rows])
        return [sample(row, seq) for row, seq in zip(logits, schedule.sampled)]

    def prepare(self, schedule: Schedule) -> tuple[Tensor, Tensor, Batch, list[int]]:
        """One flat batch: the new tokens of all sequences, one sequence after the other."""
        input_ids: list[int] = []
        positions: list[Tensor] = []
        slot_mapping: list[Tensor] = []
        layout: list[tuple[Tensor, Tensor]] = []
        sampled_rows: list[int] = []
        for seq, start, num_tokens in schedule.items:
            position = torch.arange(start + num_tokens)
            block_ids = torch.tensor(seq.block_table)[position // self.block_size]
            slots = block_ids * self.block_size + position % self.block_size
            input_ids += seq.token_ids[start : start + num_tokens]
            positions.append(position[start:])
            slot_mapping.append(slots[start:])
            layout.append((slots, position <= position[start:, None]))
            if seq in schedule.sampled:
                sampled_rows.append(len(input_ids) - 1)
        batch = Batch(self.kv_cache, torch.cat(slot_mapping), layout)
        return torch.tensor(input_ids), torch.cat(positions), batch, sampled_rows


# --- the model ---


class DenseModel:
    """Qwen3, dense. Its weights have the names of the checkpoint."""

    def __init__(self, path: Path):
        self.config = json.loads((path / "config.json").read_bytes())
        files = [load_file(file) for file in path.glob("*.safetensors")]
        self.weights = {name: tensor.float() for file in files for name, tensor in file.items()}
        self.num_layers = self.config["num_hidden_layers"]
        self.kv_sizes = self.config["num_key_value_heads"], self.config["head_dim"]
        self.rope = rope_table(self.config)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """[T] tokens -> hidden states [T, hidden_size]."""
        x = self.weights["model.embed_tokens.weight"][input_ids]
        cos_sin = self.rope[positions]
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}."
            h = self.norm(x, name + "input_layernorm")
            q, k, v = (self.linear(h, f"{name}self_attn.{part}_proj") for part in "qkv")
            q, k, v = (part.view(len(x), -1, self.config["head_dim"]) for part in (q, k, v))
            q = rotate(self.norm(q, name + "self_attn.q_norm"), cos_sin)
            k = rotate(self.norm(k, name + "self_attn.k_norm"), cos_sin)
            store_kv(k, v, batch, layer)
            attended = paged_attention(q, batch, layer)
            x = x + self.linear(attended.flatten(1), name + "self_attn.o_proj")
            h = self.norm(x, name + "post_attention_layernorm")
            gate = F.silu(self.linear(h, name + "mlp.gate_proj"))
            x = x + self.linear(gate * self.linear(h, name + "mlp.up_proj"), name + "mlp.down_proj")
        return self.norm(x, "model.norm")

    def lm_head(self, hidden: Tensor) -> Tensor:
        is_tied = self.config["tie_word_embeddings"]
        return self.linear(hidden, "model.embed_tokens" if is_tied else "lm_head")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name + ".weight"]
        return F.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])


def rope_table(config: dict) -> Tensor:
    """The angles of every position, [max_model_len, head_dim]: first half cos, second half sin."""
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    speeds = 1.0 / theta ** (torch.arange(0, config["head_dim"], 2).float() / config["head_dim"])
    angles = torch.outer(torch.arange(config["max_position_embeddings"]).float(), speeds)
    return torch.cat([angles.cos(), angles.sin()], -1)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, head_dim]: each number of the first half turns with one of the second."""
    x1, x2 = x.chunk(2, -1)
    cos, sin = cos_sin[:, None].chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def store_kv(k: Tensor, v: Tensor, batch: Batch, layer: int) -> None:
    batch.kv_cache[:, layer, batch.slot_mapping] = torch.stack([k, v])


def paged_attention(q: Tensor, batch: Batch, layer: int) -> Tensor:
    """q [T, heads, head_dim] -> the same shape. Each sequence reads its own slots."""
    keys, values = batch.kv_cache[:, layer]
    out = []
    queries = q.split([len(mask) for _, mask in batch.layout])
    for part, (slots, mask) in zip(queries, batch.layout):
        heads = (x.transpose(0, 1)[None] for x in (part, keys[slots], values[slots]))
        attended = F.scaled_dot_product_attention(*heads, mask, enable_gqa=True)
        out.append(attended[0].transpose(0, 1))
    return torch.cat(out)


# --- the next token ---


def sample(logits: Tensor, seq: Sequence) -> int:
    """The first token whose cumulative weight exceeds a random part of all weights."""
    if seq.params.temperature == 0:
        return int(logits.argmax())
    cumulative = ((logits - logits.amax()) / seq.params.temperature).exp().cumsum(-1)
    threshold = uniform(seq.params.seed, len(seq.token_ids)) * cumulative[-1]
    return int((cumulative > threshold).max(-1).indices)  # the first True


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from these two alone: 23 of splitmix64's 64 bits, exact in float32."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    return (mixed((mixed(seed) + position * 0x9E3779B97F4A7C15) % 2**64) >> 41) / 2**23
