"""Rung 4: a request that is done leaves, and one that waits enters. Each seat has room for the longest answer."""

import torch

from tutorials.ladder.qwen3 import attention
from tutorials.ladder.rung2 import Sequence
from tutorials.ladder.rung3 import SEATS


def generate(model, requests, report):
    sequences = [Sequence(request) for request in requests]
    longest = max(seq.length for seq in sequences)
    cache = torch.zeros(2, len(model.layers), SEATS, longest, model.kv_heads, model.dim)
    waiting = [*sequences]
    running = []
    free = [*range(SEATS)]
    while waiting or running:
        while waiting and free:
            seq = waiting.pop(0)
            seq.seat = free.pop()
            running.append(seq)
        sizes = step(model, cache, running)
        held = len(running) * longest
        used = sum(seq.computed for seq in running)
        report([seq.request for seq in running], sizes, held, used)
        free += [seq.seat for seq in running if len(seq.ids) == seq.length]
        running = [seq for seq in running if len(seq.ids) < seq.length]
    return [seq.ids[len(seq.request.prompt) :] for seq in sequences]


def step(model, cache, running):
    """Computes all that the sequences lack, in one flat batch. Each gets a token."""
    ids = [token for seq in running for token in seq.ids[seq.computed :]]
    positions = [torch.arange(seq.computed, len(seq.ids)) for seq in running]
    sizes = [len(position) for position in positions]

    def attend(layer, q, k, v):
        out = []
        parts = zip(running, positions, q.split(sizes), k.split(sizes), v.split(sizes))
        for seq, position, query, key, value in parts:
            keys, values = cache[:, layer, seq.seat, : len(seq.ids)]
            keys[position] = key
            values[position] = value
            sees = torch.arange(len(seq.ids)) <= position[:, None]
            out.append(attention(query, keys, values, sees))
        return torch.cat(out)

    logits = model.logits(torch.tensor(ids), torch.cat(positions), attend)
    for seq, rows in zip(running, logits.split(sizes)):
        seq.computed = len(seq.ids)
        seq.ids.append(int(rows[-1].argmax()))
    return sizes
