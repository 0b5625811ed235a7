"""Sequence and Request: the state of what a user asked for. No torch in here."""

from collections.abc import Iterable
from functools import cached_property

from nanovllm.sampling_params import SamplingParams


class Sequence:
    """A prompt and one output for it.

    `token_ids` are its tokens. The first `num_computed_tokens` of them have their keys and values in
    the KV cache, in the blocks that `block_table` lists: token i is in block `block_table[i // block_size]`
    at offset `i % block_size` (paper, section 4.3). A step computes some of those that are missing.
    """

    def __init__(self, request: "Request", index: int):
        self.request = request
        self.index = index
        self.token_ids = list(request.prompt_token_ids)
        self.logprobs: list[dict[int, float]] | None = None if request.params.logprobs is None else []  # of the output
        self.cumulative_logprob = 0.0  # of a beam
        self.finish_reason: str | None = None  # "stop", "length", "abort" or "error"
        self.restart()

    def restart(self) -> None:
        """Forgets all that is in a cache. What counts stays: its tokens, and a log-probability for each."""
        if self.logprobs is not None:
            del self.logprobs[self.num_output_tokens :]
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.prefix_ids: list[int] = []  # identity of the prefix that each full block ends, see BlockManager
        self.host_table: list[int] = []  # blocks in the host's memory, while it is swapped out ...
        self.num_host_tokens = 0  # ... and how many tokens they hold

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
        """Every output of a request draws its own numbers."""
        return (self.request.seed + self.index * 0x9E3779B97F4A7C15) % 2**63

    def __repr__(self) -> str:
        state = self.finish_reason or f"{self.num_computed_tokens} of {len(self)} tokens computed"
        return f"Sequence({self.request.request_id}.{self.index}: {state}, blocks {self.block_table})"


class Request:
    """One prompt with its parameters, and its `params.n` sequences.

    They are scheduled, preempted and resumed together (paper, section 4.5). The first one computes the tokens that all
    have in common, which at the start is the prompt; then the others fork from it.
    """

    def __init__(
        self,
        request_id: str | None,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        eos_token_ids: Iterable[int] = (),
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.stop_token_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self.arrival = 0  # a counter, so that no two requests arrive together
        self.seed = params.seed or 0
        self.num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache when it was first admitted
        self.has_forked = False  # whether its sequences have blocks of their own, or only the first one runs
        self.num_shared_tokens = 0  # before they fork: how many tokens they have in common
        self.beam_search = None  # a BeamSearch if its sequences are beams

    @cached_property
    def sequences(self) -> list[Sequence]:
        """Made when first asked for: a request that is refused has none."""
        return [Sequence(self, index) for index in range(self.params.n)]

    @property
    def unfinished(self) -> list[Sequence]:
        return [seq for seq in self.sequences if seq.finish_reason is None]

    @property
    def running(self) -> list[Sequence]:
        """The unfinished sequences; before they fork only the first, which computes what all have in common."""
        return self.unfinished if self.has_forked else self.unfinished[:1]

    @property
    def num_seats(self) -> int:
        """The most sequences that it may have in a step from now on. Few beams can have many children."""
        return len(self.unfinished) if self.beam_search is None else self.params.n

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are asked for, each time that a token is drawn."""
        return self.params.logprobs if self.beam_search is None else self.beam_search.num_candidates

    def rewind(self) -> None:
        """After a step was interrupted when only some had their next token: all get it again, together."""
        shortest = min(map(len, self.unfinished), default=0)
        for seq in self.unfinished:
            del seq.token_ids[shortest:]

    @property
    def is_finished(self) -> bool:
        return not self.unfinished
