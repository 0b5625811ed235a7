"""LogitsRules: what changes the logits of a request before its tokens are sampled.

Imports no torch.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from nanovllm.sequence import Request, Sequence
from nanovllm.topics.decoding.masks import Words, words_of
from nanovllm.topics.decoding.structured import Grammar, Source, grammar_of


class TokenCounts:
    """The distinct tokens of a sequence, and how often its output has each.

    They are kept from step to step, so that a step looks at the new tokens only.
    """

    def __init__(self, prompt_token_ids: list[int]):
        self.places: dict[int, int] = {}
        self.pairs = array("i")  # token id, count, token id, count ...
        self.num_seen = 0  # tokens that have been looked at
        self.add(prompt_token_ids, 0)

    def add(self, token_ids: list[int], count: int) -> None:
        for token_id in token_ids[self.num_seen :]:
            place = self.places.setdefault(token_id, len(self.pairs))
            if place == len(self.pairs):
                self.pairs.extend((token_id, 0))
            self.pairs[place + 1] += count
        self.num_seen = len(token_ids)


@dataclass
class LogitsRules:
    """Biases and penalties change a logit (penalties.py), words and grammars forbid tokens
    (masks.py)."""

    biases: dict[int, float]  # token id -> what is added to its logit
    has_penalty: bool
    words: Words | None = None
    grammar: Grammar | None = None
    counts: dict[int, TokenCounts] = field(default_factory=dict)  # of each sequence, by its index

    def check(self, seq: Sequence) -> None:
        """Raises an error if the sequence has ended and does not match its grammar."""
        if self.grammar is not None:
            self.grammar.check(seq)


def rules_of(request: Request, source: Source) -> LogitsRules:
    """Raises ValueError."""
    params = request.params
    is_counted = params.presence_penalty or params.frequency_penalty
    has_penalty = bool(is_counted or params.repetition_penalty != 1)
    rules = LogitsRules({**(params.logit_bias or {})}, has_penalty)
    if params.allowed_token_ids or params.bad_words:
        rules.words = words_of(params, source.tokenizer, source.vocab_size)
    if params.structured_outputs:
        rules.grammar = grammar_of(params, source)
        rules.grammar.think_first(request, source.tokenizer)
    return rules
