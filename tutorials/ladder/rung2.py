"""Rung 2: keys and values are kept. A step computes one token, and looks up the others."""

import torch

from tutorials.ladder.qwen3 import attention


def generate(model, requests, report):
    return [answer(model, request, report) for request in requests]


def answer(model, request, report):
    ids = list(request.prompt)
    longest = len(ids) + request.max_tokens
    cache = torch.zeros(2, len(model.layers), longest, model.kv_heads, model.dim)
    computed = 0
    for _ in range(request.max_tokens):
        new = ids[computed:]
        positions = torch.arange(computed, len(ids))

        def attend(layer, q, k, v):
            keys, values = cache[:, layer]
            keys[positions] = k
            values[positions] = v
            sees = torch.arange(len(ids)) <= positions[:, None]
            return attention(q, keys[: len(ids)], values[: len(ids)], sees)

        logits = model.logits(torch.tensor(new), positions, attend)
        computed = len(ids)
        ids.append(int(logits[-1].argmax()))
        report(tokens=len(new), held=longest, used=computed)
    return ids[len(request.prompt) :]
