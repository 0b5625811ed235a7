"""Sequence and Request: a user's request, and its progress. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

from nanovllm.sampling_params import SamplingParams

TokenLogprobs = dict[int, float]  # token id -> log-probability; the token itself comes first
StepLogprobs = list[TokenLogprobs | None] | None  # of each sampled sequence, if any wants some


@dataclass(eq=False, repr=False)
class Sequence:
    """A prompt and one of its outputs.

    `token_ids` are its tokens. The first `num_computed_tokens` of them have their keys and values
    in the KV cache, in the blocks that `block_table` lists: token i is in block
    `block_table[i // block_size]` at offset `i % block_size` (paper, section 4.3). A step computes
    some of the missing ones.
    """

    request: Request
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # of each output token, if requested
    cumulative_logprob: float = 0.0  # of a beam
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    prefix_ids: list[int] = field(default_factory=list)  # of each full block, see BlockManager
    state_slot: int = 0  # of its state, in a hybrid model (chapter 23); 0 is none
    host_table: list[int] = field(default_factory=list)  # its blocks in host memory, if swapped out
    num_host_tokens: int = 0  # tokens in them

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @cached_property
    def seed(self) -> int:
        """The seed of the sequence's random numbers: each output of a request has its own."""
        return (self.request.seed + self.index * 0x9E3779B97F4A7C15) % 2**63

    def forget_pending(self) -> None:
        """Takes away a pending token, if it has one (device/overlap.py)."""
        if self.token_ids[-1] < 0:
            self.token_ids.pop()

    def forget_blocks(self) -> None:
        """Forgets all blocks, after the cache was cleared."""
        self.num_computed_tokens = 0
        self.block_table = []
        self.prefix_ids = []
        self.state_slot = 0
        self.num_host_tokens = 0
        self.host_table = []

    def __repr__(self) -> str:
        computed = f"{self.num_computed_tokens} of {len(self)} tokens computed"
        name = f"{self.request.request_id}.{self.index}"
        return f"Sequence({name}: {self.finish_reason or computed}, blocks {self.block_table})"


# of a step: sequences with their new tokens, and the likeliest ones
NewTokens = Iterable[tuple[Sequence, int, TokenLogprobs | None]]


class Rules(Protocol):
    """What changes the logits of a request: LogitsRules in topics/decoding."""

    biases: dict[int, float]
    has_penalty: bool
    words: Any
    grammar: Any
    counts: dict[int, Any]

    def check(self, seq: Sequence) -> None:
        """Raises an error if the sequence has ended and breaks a rule."""


@dataclass(eq=False, repr=False)
class Request:
    """One prompt with its parameters, and its `params.n` sequences.

    The sequences are scheduled, preempted and resumed together (paper, section 4.5). The first
    sequence computes the tokens that all share (at the start, the prompt); then the others fork
    from it.
    """

    name_of_n: ClassVar[str] = "n"  # what users call the number of sequences
    is_search: ClassVar[bool] = False  # a BeamRequest

    request_id: str  # empty until it is submitted, unless the user has chosen one
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: Iterable[int] = ()
    max_len: int = 0  # maximum tokens per sequence, prompt included; set by Scheduler.set_max_len
    arrival: int = 0  # a counter, so that no two requests have the same
    arrival_time: float = 0.0  # in seconds, by the scheduler's clock
    num_cached_tokens: int | None = None  # prompt tokens found in the cache at the first admission
    has_forked: bool = False  # whether each sequence has its own blocks; else only the first runs
    num_shared_tokens: int = 0  # before the fork: the number of tokens that all sequences share
    user_priority: int = 0  # the smallest is served first
    client: str = ""  # of a server, see topics/fairness (chapter 17)
    rules: Rules | None = None  # what changes its logits, if it `needs_rules`
    # of the prompt's tokens, as far as computed, if requested; the first one has none
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])

    def __post_init__(self):
        params = self.params
        self.seed = params.seed or 0
        # the id of the empty prefix: requests with different ones never share blocks
        self.root_prefix_id = params.cache_salt or 0
        self.num_logprobs = params.logprobs  # how many of the likeliest tokens to return
        self.needs_rules = params.changes_logits
        self.is_greedy = params.temperature == 0 and not self.needs_rules
        eos_token_ids = () if params.ignore_eos else self.eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids or ()).union(eos_token_ids)
        self.user_stop_token_ids = self.stop_token_ids.difference(eos_token_ids)

    @cached_property
    def sequences(self) -> list[Sequence]:
        """The sequences, created on first use: a request that is refused, or that still waits, has
        none."""
        has_logprobs = self.params.logprobs is not None
        return [
            Sequence(self, i, [*self.prompt_token_ids], [] if has_logprobs else None)
            for i in range(self.params.n)
        ]

    @property
    def is_new(self) -> bool:
        """Whether the request has only waited so far."""
        return "sequences" not in vars(self)

    @property
    def unfinished(self) -> list[Sequence]:
        return [seq for seq in self.sequences if seq.finish_reason is None]

    @property
    def has_ended(self) -> bool:
        return all([seq.finish_reason is not None for seq in self.sequences])

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens so far, over all sequences."""
        return sum(seq.num_output_tokens for seq in self.sequences)

    @property
    def is_prefilling(self) -> bool:
        """Whether a sequence has more than one missing token: the prompt, or tokens lost in a
        preemption."""
        return any(seq.num_missing_tokens > 1 for seq in self.unfinished)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still missing. Then the tokens of the prompt
        must be computed, even if they are cached."""
        is_wanted = self.params.prompt_logprobs is not None
        return is_wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    @property
    def most_sequences(self) -> int:
        """The most sequences that the request can have in a step from now on."""
        made = vars(self).get("sequences")  # a request that waits has none yet
        return self.params.n if made is None else len(self.unfinished)

    def rewind(self) -> None:
        """Keeps only the tokens and their log-probabilities, after a failed or interrupted
        step. If only some sequences have their next token, they lose it, and all sample it
        again together."""
        self.has_forked = False
        if self.is_new:
            return
        if self.rules is not None:
            self.rules.counts.clear()
        for seq in self.sequences:
            seq.forget_pending()
        shortest = min((len(seq) for seq in self.unfinished), default=0)
        for seq in self.sequences:
            if seq.finish_reason is None:
                del seq.token_ids[shortest:]
            if seq.logprobs is not None:
                del seq.logprobs[seq.num_output_tokens :]
            seq.forget_blocks()

    def __repr__(self) -> str:
        return f"Request({self.request_id})"
