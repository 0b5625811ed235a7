"""Rung 5: block tables. A sequence holds blocks for the tokens that it has, wherever they are."""

import torch

from tutorials.ladder.qwen3 import attention
from tutorials.ladder.rung3 import SEATS

BLOCK_SIZE = 16
NUM_BLOCKS = 64


class Sequence:
    def __init__(self, request):
        self.request = request
        self.ids = list(request.prompt)
        self.length = len(request.prompt) + request.max_tokens  # in the end
        self.computed = 0  # tokens whose keys and values are in the cache
        self.blocks = []  # the block table: token i is in its block i // BLOCK_SIZE

    @property
    def slots(self):
        slots = torch.tensor(self.blocks)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
        return slots.flatten()[: len(self.ids)]


def generate(model, requests, report):
    sequences = [Sequence(request) for request in requests]
    cache = torch.zeros(2, len(model.layers), NUM_BLOCKS * BLOCK_SIZE, model.kv_heads, model.dim)
    waiting = [*sequences]
    running = []
    free = [*range(NUM_BLOCKS)]
    while waiting or running:
        while waiting and len(running) < SEATS and grow(waiting[0], free):
            running.append(waiting.pop(0))
        sizes = step(model, cache, running)
        held = sum(len(seq.blocks) for seq in running) * BLOCK_SIZE
        used = sum(seq.computed for seq in running)
        report([seq.request for seq in running], sizes, held, used)
        for seq in [*running]:
            is_done = len(seq.ids) == seq.length
            if is_done or not grow(seq, free):
                running.remove(seq)
                free += seq.blocks
                seq.blocks, seq.computed = [], 0
                if not is_done:  # there is no block for its next token: it begins again
                    waiting.insert(0, seq)
    return [seq.ids[len(seq.request.prompt) :] for seq in sequences]


def grow(seq, free):
    """Gives the sequence blocks for all its tokens, if there are enough."""
    missing = -(-len(seq.ids) // BLOCK_SIZE) - len(seq.blocks)
    if missing > len(free):
        return False
    seq.blocks += [free.pop() for _ in range(missing)]
    return True


def step(model, cache, running):
    """Computes all that the sequences lack, in one flat batch. Each gets a token."""
    ids = [token for seq in running for token in seq.ids[seq.computed :]]
    positions = [torch.arange(seq.computed, len(seq.ids)) for seq in running]
    sizes = [len(position) for position in positions]

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
        seq.computed = len(seq.ids)
        seq.ids.append(int(rows[-1].argmax()))
    return sizes
