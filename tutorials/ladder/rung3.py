"""Rung 3: several requests in one batch, padded to the longest. It starts together and ends together."""

import torch

from tutorials.ladder.qwen3 import attention

SEATS = 8


def generate(model, requests, report):
    batches = [requests[i : i + SEATS] for i in range(0, len(requests), SEATS)]
    return [ids for batch in batches for ids in answers(model, batch, report)]


def answers(model, batch, report):
    ids = [list(request.prompt) for request in batch]
    steps = max(request.max_tokens for request in batch)
    longest = max(map(len, ids)) + steps
    cache = torch.zeros(2, len(model.layers), len(batch), longest, model.kv_heads, model.dim)
    rows = torch.arange(len(batch))[:, None]
    computed = torch.zeros(len(batch), dtype=torch.int64)
    for _ in range(steps):
        new = [row[start:] for row, start in zip(ids, computed)]
        width = max(map(len, new))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in new])
        positions = computed[:, None] + torch.arange(width)

        def attend(layer, q, k, v):
            keys, values = cache[:, layer]
            keys[rows, positions] = k
            values[rows, positions] = v
            sees = torch.arange(longest) <= positions[..., None]
            return attention(q, keys, values, sees[:, None])

        logits = model.logits(padded, positions, attend)
        computed = torch.tensor([len(row) for row in ids])
        for i, row in enumerate(ids):
            row.append(int(logits[i, len(new[i]) - 1].argmax()))
        report(tokens=padded.numel(), held=len(batch) * longest, used=int(computed.sum()))
    ends = [len(request.prompt) + request.max_tokens for request in batch]
    return [row[len(r.prompt) : end] for row, r, end in zip(ids, batch, ends)]
