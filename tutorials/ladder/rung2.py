"""Rung 2: keys and values are kept. A step computes the new tokens only, and looks up the others."""

import torch

from tutorials.ladder.qwen3 import attention


class Sequence:
    def __init__(self, request):
        self.request = request
        self.ids = list(request.prompt)
        self.length = len(request.prompt) + request.max_tokens  # in the end
        self.computed = 0  # tokens whose keys and values are in the cache


def generate(model, requests, report):
    sequences = [Sequence(request) for request in requests]
    for seq in sequences:
        cache = torch.zeros(2, len(model.layers), seq.length, model.kv_heads, model.dim)
        while len(seq.ids) < seq.length:
            sizes = step(model, cache, seq)
            report([seq.request], sizes, seq.length, seq.computed)
    return [seq.ids[len(seq.request.prompt) :] for seq in sequences]


def step(model, cache, seq):
    """Computes all that the sequence lacks. It gets a token."""
    ids = seq.ids[seq.computed :]
    position = torch.arange(seq.computed, len(seq.ids))

    def attend(layer, q, k, v):
        keys, values = cache[:, layer, : len(seq.ids)]
        keys[position] = k
        values[position] = v
        sees = torch.arange(len(seq.ids)) <= position[:, None]
        return attention(q, keys, values, sees)

    logits = model.logits(torch.tensor(ids), position, attend)
    seq.computed = len(seq.ids)
    seq.ids.append(int(logits[-1].argmax()))
    return [len(ids)]
