"""Rung 6: one rule for prompts, chunks and decodes: a step computes some of the missing tokens, within a budget."""

import torch

from tutorials.ladder.qwen3 import attention
from tutorials.ladder.rung3 import SEATS
from tutorials.ladder.rung5 import BLOCK_SIZE, NUM_BLOCKS, Sequence, grow

BUDGET = 64  # tokens per step


def generate(model, requests, report):
    sequences = [Sequence(request) for request in requests]
    cache = torch.zeros(2, len(model.layers), NUM_BLOCKS * BLOCK_SIZE, model.kv_heads, model.dim)
    waiting = [*sequences]
    running = []
    free = [*range(NUM_BLOCKS)]
    while waiting or running:
        plan(running, waiting, free)
        computing = [seq for seq in running if seq.new]
        sizes = step(model, cache, computing)
        held = sum(len(seq.blocks) for seq in running) * BLOCK_SIZE
        used = sum(seq.computed for seq in running)
        report([seq.request for seq in computing], sizes, held, used)
        for seq in [*running]:
            is_done = len(seq.ids) == seq.length
            if is_done or not grow(seq, free):
                running.remove(seq)
                free += seq.blocks
                seq.blocks, seq.computed = [], 0
                if not is_done:  # there is no block for its next token: it begins again
                    waiting.insert(0, seq)
    return [seq.ids[len(seq.request.prompt) :] for seq in sequences]


def plan(running, waiting, free):
    """Gives each sequence some of the tokens that it lacks: first running ones, then new ones."""
    left = BUDGET
    for seq in [*running, *waiting]:
        if seq not in running:
            if not left or len(running) == SEATS or not grow(seq, free):
                break
            running.append(waiting.pop(0))
        seq.new = min(len(seq.ids) - seq.computed, left)
        left -= seq.new


def step(model, cache, running):
    """Computes the planned tokens in one flat batch. A sequence that lacks no more gets a token."""
    sizes = [seq.new for seq in running]
    ids = [token for seq in running for token in seq.ids[seq.computed : seq.computed + seq.new]]
    positions = [torch.arange(seq.computed, seq.computed + seq.new) for seq in running]

    def attend(layer, q, k, v):
        keys, values = cache[:, layer]
        out = []
        parts = zip(running, positions, q.split(sizes), k.split(sizes), v.split(sizes))
        for seq, position, query, key, value in parts:
            keys[seq.slots[position]] = key
            values[seq.slots[position]] = value
            sees = torch.arange(len(seq.ids)) <= position[:, None]
            out.append(attention(query, keys[seq.slots], values[seq.slots], sees))
        return torch.cat(out)

    logits = model.logits(torch.tensor(ids), torch.cat(positions), attend)
    for seq, rows in zip(running, logits.split(sizes)):
        seq.computed += seq.new
        if seq.computed == len(seq.ids):
            seq.ids.append(int(rows[-1].argmax()))
    return sizes
