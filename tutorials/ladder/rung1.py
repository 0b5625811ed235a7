"""Rung 1: everything again for each token."""

import torch

from tutorials.ladder.qwen3 import attention


def generate(model, requests, report):
    return [answer(model, request, report) for request in requests]


def answer(model, request, report):
    ids = list(request.prompt)
    for _ in range(request.max_tokens):

        def attend(layer, q, k, v):
            sees = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
            return attention(q, k, v, sees)

        logits = model.logits(torch.tensor(ids), torch.arange(len(ids)), attend)
        ids.append(int(logits[-1].argmax()))
        report([request], [len(ids) - 1])
    return ids[len(request.prompt) :]
