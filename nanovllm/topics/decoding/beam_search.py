"""Beam search: the search itself, without a model, and what it does to a request and its blocks.

At each step, every running beam with every next token is a candidate. The most likely candidates
become the new beams; those of them that end are kept as results. The rules are those of
transformers' `generate(num_beams=...)`. Imports no torch.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nanovllm.block_manager import BlockManager
from nanovllm.options import POSITIVE, Rule, number
from nanovllm.sampling_params import LARGEST_COUNT, RequestParams, SamplingParams
from nanovllm.sequence import NewTokens, Request, Sequence, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(RequestParams):
    beam_width: int = 4
    """Number of beams kept after each step, and of results."""

    max_tokens: int = 256
    """Maximum tokens to generate."""

    length_penalty: float = 1.0
    """A result's score is its log-probability / length ** length_penalty. Values above 0 favor long
    results."""

    early_stopping: bool | str = False
    """When the search ends: True, as soon as there are `beam_width` results; False, when a better
    one is unlikely; "never", only when a better one is impossible."""

    ignore_eos: bool = False
    """Continue past the model's end-of-sequence tokens."""

    RULES: ClassVar[dict[str, Rule]] = {
        "beam_width": POSITIVE,
        "max_tokens": POSITIVE,
        "length_penalty": number(-10, 10),
        "early_stopping": Rule(
            lambda value: isinstance(value, bool) or value == "never", "True, False or 'never'"
        ),
    }

    def __post_init__(self):
        super().__post_init__()
        self.put("max_tokens", min(self.max_tokens, LARGEST_COUNT))

    def sampling_params(self) -> SamplingParams:
        """The search as sampling parameters, for code that does not treat searches differently."""
        return SamplingParams(
            n=self.beam_width, temperature=0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
        )

    def new_request(self, *fields: Any) -> BeamRequest:
        """A request from its first fields, see Request."""
        request = Request(*fields)
        search = BeamSearch(self, request.stop_token_ids, self.max_tokens)
        return BeamRequest(*fields, search=search)


@dataclass
class Beam:
    """A candidate: a sequence with one more token, or, as a result, perhaps unchanged."""

    parent: Sequence
    token_id: int | None  # None: the sequence unchanged
    cumulative_logprob: float  # of all output tokens
    score: float = float("-inf")  # of a result

    @property
    def token_ids(self) -> list[int]:
        """Its output tokens."""
        last = [] if self.token_id is None else [self.token_id]
        return self.parent.output_token_ids + last


@dataclass
class BeamSearch:
    """The state of one request's search."""

    params: BeamSearchParams
    stop_token_ids: frozenset[int]
    max_output_tokens: int
    results: list[Beam] = field(default_factory=list)  # the best so far, best first

    @property
    def num_candidates(self) -> int:
        """Enough candidates that `beam_width` remain even if all the others end."""
        return max(2, 1 + len(self.stop_token_ids)) * self.params.beam_width

    def advance(self, candidates: list[Beam]) -> list[Beam]:
        """Takes the most likely next tokens of every running beam. Returns the beams that continue,
        none at the end.

        Only the first `num_candidates` count, the likeliest first. One that ends, by a stop token
        or at `max_output_tokens`, becomes a result only if it is among the first `beam_width`.
        """
        width = self.params.beam_width
        candidates = sorted(candidates, key=lambda beam: -beam.cumulative_logprob)
        running: list[Beam] = []
        length = candidates[0].parent.num_output_tokens + 1
        for rank, beam in enumerate(candidates[: self.num_candidates]):
            if length < self.max_output_tokens and beam.token_id not in self.stop_token_ids:
                running.append(beam)
            elif rank < width:  # one that ends must be among the best
                beam.score = self._score(beam, length)
                self.results = best([*self.results, beam], width)
        running = running[:width]
        return [] if not running or self._is_decided(running[0], length) else running

    def best_so_far(self, sequences: list[Sequence]) -> list[Beam]:
        """The results of a search that was cut short. Its running sequences are results, too."""
        beams = [Beam(seq, None, seq.cumulative_logprob) for seq in sequences]
        for beam in beams:
            beam.score = self._score(beam, max(1, beam.parent.num_output_tokens))
        return best(self.results + beams, self.params.beam_width)

    def _score(self, beam: Beam, length: int) -> float:
        """Log-probability / length ** length_penalty."""
        return beam.cumulative_logprob / length**self.params.length_penalty

    def _is_decided(self, likeliest: Beam, length: int) -> bool:
        """Whether there are `beam_width` results, and no running beam is expected to beat the worst
        of them. `length` is that of the running beams, with their new tokens. "never" takes the
        length with which the likeliest beam would have its best score."""
        if len(self.results) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.max_output_tokens  # the length that gives the best score
        return self._score(likeliest, length) <= self.results[-1].score


def best(beams: list[Beam], count: int) -> list[Beam]:
    """The `count` beams with the highest scores, best first."""
    return sorted(beams, key=lambda beam: -beam.score)[:count]


# --- what a search does to its request ---


@dataclass(eq=False, repr=False)
class BeamRequest(Request):
    """A request whose sequences are the beams of a search."""

    name_of_n: ClassVar[str] = "beam_width"
    is_search: ClassVar[bool] = True

    search: BeamSearch = field(kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        self.num_logprobs = self.search.num_candidates

    @property
    def most_sequences(self) -> int:
        """The beam width: even one beam can have this many children in the next step."""
        return self.params.n

    def receive(
        self, likeliest: list[tuple[Sequence, TokenLogprobs]], block_manager: BlockManager
    ) -> None:
        """Takes a step's result: of each beam, the most likely next tokens. Only forks and frees:
        every new beam forks from its parent, then all parents are freed.

        Right after the prompt, all rows are the same, and the first one counts. At the end of the
        search, the request has no sequences left.
        """
        if likeliest[0][0].num_output_tokens == 0:
            likeliest = likeliest[:1]  # right after the prompt, all beams are the same
        candidates = [
            Beam(seq, token_id, seq.cumulative_logprob + logprob)
            for seq, logprobs in likeliest
            for token_id, logprob in logprobs.items()
        ]
        search = copy(self.search)  # results are replaced, never changed
        search.max_output_tokens = self.max_len - len(self.prompt_token_ids)  # as many as fit
        children: list[Sequence] = []
        for beam in search.advance(candidates):
            child = Sequence(self, len(children), self.prompt_token_ids + beam.token_ids)
            child.cumulative_logprob = beam.cumulative_logprob
            block_manager.fork(beam.parent, child)
            children.append(child)
        for seq in self.sequences:
            block_manager.free(seq)
        # in one statement: a Ctrl-C changes both or neither
        self.sequences, self.search = children, search


def advance_searches(rows: NewTokens, manager: BlockManager, running: list[Request]) -> NewTokens:
    """Yields the rows of a step that are not beams, then advances the searches with their rows. A
    request whose search has ended leaves `running`."""
    searches: dict[BeamRequest, list[tuple[Sequence, TokenLogprobs]]] = {}
    for row in rows:
        seq, _, likeliest = row
        if isinstance(seq.request, BeamRequest):
            searches.setdefault(seq.request, []).append((seq, likeliest or {}))
        else:
            yield row
    for request, beams in searches.items():
        request.receive(beams, manager)
        if request.has_ended:
            running.remove(request)
