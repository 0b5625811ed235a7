"""Rung 3: several sequences in one batch, padded to the longest. It starts together and ends together."""

import torch

from tutorials.ladder.qwen3 import attention
from tutorials.ladder.rung2 import Sequence

SEATS = 8


def generate(model, requests, report):
    sequences = [Sequence(request) for request in requests]
    for i in range(0, len(sequences), SEATS):
        running = sequences[i : i + SEATS]
        steps = max(seq.request.max_tokens for seq in running)
        longest = max(len(seq.ids) for seq in running) + steps
        cache = torch.zeros(2, len(model.layers), len(running), longest, model.kv_heads, model.dim)
        for _ in range(steps):
            sizes = step(model, cache, running)
            held = len(running) * longest
            used = sum(seq.computed for seq in running)
            report([seq.request for seq in running], sizes, held, used)
    return [seq.ids[len(seq.request.prompt) : seq.length] for seq in sequences]


def step(model, cache, running):
    """Computes all that the sequences lack, in a rectangle. Each gets a token, wanted or not."""
    new = [seq.ids[seq.computed :] for seq in running]
    width = max(len(ids) for ids in new)
    padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in new])
    positions = torch.tensor([seq.computed for seq in running])[:, None] + torch.arange(width)
    rows = torch.arange(len(running))[:, None]

    def attend(layer, q, k, v):
        keys, values = cache[:, layer]
        keys[rows, positions] = k
        values[rows, positions] = v
        sees = torch.arange(keys.shape[1]) <= positions[..., None]
        return attention(q, keys, values, sees[:, None])

    logits = model.logits(padded, positions, attend)
    for seq, ids, row in zip(running, new, logits):
        seq.computed = len(seq.ids)
        seq.ids.append(int(row[len(ids) - 1].argmax()))
    return [width] * len(running)
