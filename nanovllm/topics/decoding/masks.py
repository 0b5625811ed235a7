"""Masks: the tokens that a sequence may sample, by its grammar, by a list of tokens, and by bad
words.

Imports no torch until a step masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.options import refusal
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Rules, Sequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Words:
    """The `allowed_token_ids` of a request, and its `bad_words`. Bit i of a number is token i."""

    allowed: int  # without bad words of one token
    bad: dict[int, list[list[int]]]  # tokens of the others, by the last but one of them

    def bits(self, seq: Sequence) -> int:
        """The allowed tokens, without those that would complete a bad word."""
        bits = self.allowed
        output = seq.output_token_ids
        for *before, last in self.bad.get(seq.token_ids[-1], ()):
            if output[-len(before) :] == before:
                bits &= ~(1 << last)
        return bits


def words_of(params: SamplingParams, tokenizer: Any, vocab_size: int) -> Words:
    """Raises ValueError. A bad word has other tokens after a space, so both forms are looked
    for."""
    allowed = (1 << vocab_size) - 1
    if params.allowed_token_ids:
        allowed = 0
        for i in params.allowed_token_ids:
            allowed |= 1 << i
    bad: dict[int, list[list[int]]] = {}
    if params.bad_words and tokenizer is None:
        raise refusal("bad_words", params.bad_words, "the model has no tokenizer")
    for word in params.bad_words or ():
        forms = {word, " " + word.lstrip(" ")}
        for text in forms:
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if len(token_ids) > 1:
                bad.setdefault(token_ids[-2], []).append(token_ids)
            elif token_ids:
                allowed &= ~(1 << token_ids[0])
    return Words(allowed, bad)


def mask_of(seq: Sequence, rules: Rules, num_bytes: int) -> bytes:
    """A bit for each token. If no token is allowed, the sequence may end."""
    request = seq.request
    bits = (1 << 8 * num_bytes) - 1
    words = rules.words
    if words is not None:
        bits &= words.bits(seq)
    grammar = rules.grammar
    if grammar is not None:
        bits &= grammar.bits(seq)
    if not bits:
        bits = sum(1 << i for i in request.eos_token_ids)
    return bits.to_bytes(num_bytes, "little")


def masked_logits(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """logits [B, vocab_size] -> a copy in fp32 in which a token that is forbidden is never the
    likeliest, and never drawn; the same logits if nothing is forbidden to any sequence.

    What is forbidden gets a finite logit, as kernels subtract one from another. So does what is
    allowed, even if `min_tokens` is against it: the mask wins.
    """
    rows = {}
    for row, seq in enumerate(seqs):
        rules = seq.request.rules
        if rules is not None and (rules.words or rules.grammar):
            rows[row] = rules
    if not rows:
        return logits
    import torch

    from nanovllm.step import integers, move

    num_bytes = -(-logits.shape[1] // 32) * 4
    masks = bytearray()
    for row, rules in rows.items():
        masks += mask_of(seqs[row], rules, num_bytes)
    packed = torch.frombuffer(masks, dtype=torch.uint8).view(len(rows), -1, 1)
    moved = move({"rows": integers(rows), "packed": packed}, logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (moved["packed"] >> shifts & 1).view(len(rows), -1)
    is_allowed = bits[:, : logits.shape[1]].bool()  # [rows, vocab_size]
    logits = logits.to(torch.float32, copy=True)
    lowest = torch.finfo(torch.float32).min
    own = moved["rows"]
    at_least = logits[own].clamp(min=lowest / 2)
    logits[own] = at_least.where(is_allowed, lowest)
    return logits
