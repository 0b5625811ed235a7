"""Beam search: the search itself, without a model, and what it does to a request and its blocks. Imports no torch.

At each step, every running beam with every next token is a candidate. The most likely candidates become the new beams;
those of them that end are kept as results. The rules are those of transformers' `generate(num_beams=...)`.
"""

from copy import copy
from dataclasses import dataclass

from nanovllm.block_manager import BlockManager
from nanovllm.options import Options, is_int, is_number
from nanovllm.sampling_params import LARGEST_COUNT, SamplingParams
from nanovllm.sequence import Request, Sequence

Likeliest = list[
    tuple[Sequence, dict[int, float]]
]  # each beam's most likely next tokens, with their log-probabilities


@dataclass(kw_only=True)
class BeamSearchParams(Options):
    beam_width: int = 4
    """Number of beams kept after each step, and of results."""
    max_tokens: int = 256
    """Maximum tokens to generate."""
    length_penalty: float = 1.0
    """A result's score is its log-probability / length ** length_penalty. Values above 0 favor long results."""
    early_stopping: bool | str = False
    """When the search ends: True, as soon as there are `beam_width` results; False, when a better one is unlikely;
    "never", only when a better one is impossible."""
    ignore_eos: bool = False
    """Continue past the model's end-of-sequence tokens."""

    def __post_init__(self):
        self.require("beam_width", is_int(self.beam_width, 1), "a positive integer")
        self.require("max_tokens", is_int(self.max_tokens, 1), "a positive integer")
        self.require("length_penalty", is_number(self.length_penalty, -10, 10), "from -10 to 10")
        is_bool = isinstance(self.early_stopping, bool)
        self.require(
            "early_stopping", is_bool or self.early_stopping == "never", "True, False or 'never'"
        )
        self.require("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")
        self.max_tokens = min(self.max_tokens, LARGEST_COUNT)

    def sampling_params(self) -> SamplingParams:
        """The search as sampling parameters, for code that need not know that it is a search."""
        return SamplingParams(
            n=self.beam_width, temperature=0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
        )


@dataclass
class Beam:
    """A candidate: the sequence that it continues, its next token, and the log-probability of all its output tokens."""

    parent: Sequence
    token_id: int | None  # None: the sequence unchanged
    cumulative_logprob: float
    score: float = float("-inf")  # of a result

    @property
    def token_ids(self) -> list[int]:
        return self.parent.output_token_ids + ([] if self.token_id is None else [self.token_id])


class BeamSearch:
    """The state of one request's search."""

    def __init__(
        self, params: BeamSearchParams, stop_token_ids: frozenset[int], max_output_tokens: int
    ):
        self.params, self.stop_token_ids, self.max_output_tokens = (
            params,
            stop_token_ids,
            max_output_tokens,
        )
        self.results: list[Beam] = []  # the best so far, best first

    @property
    def num_candidates(self) -> int:
        """Enough that `beam_width` remain even if all the others end."""
        return max(2, 1 + len(self.stop_token_ids)) * self.params.beam_width

    def advance(self, candidates: list[Beam]) -> list[Beam]:
        """Takes the most likely next tokens of every running beam; returns the beams that continue, none at the end."""
        width, penalty = self.params.beam_width, self.params.length_penalty
        candidates = sorted(candidates, key=lambda beam: -beam.cumulative_logprob)[
            : self.num_candidates
        ]
        length = candidates[0].parent.num_output_tokens + 1
        is_last = length >= self.max_output_tokens
        ends = [is_last or beam.token_id in self.stop_token_ids for beam in candidates]
        ended = [beam for beam, has_ended in zip(candidates[:width], ends) if has_ended]
        for beam in ended:
            beam.score = beam.cumulative_logprob / length**penalty
        self.results = sorted(self.results + ended, key=lambda beam: -beam.score)[:width]
        running = [beam for beam, has_ended in zip(candidates, ends) if not has_ended][:width]
        return [] if not running or self._is_decided(running[0], length) else running

    def best_so_far(self, sequences: list[Sequence]) -> list[Beam]:
        """The results of a search that was cut short. Its running sequences count as results, too."""
        beams = [Beam(seq, None, seq.cumulative_logprob) for seq in sequences]
        for beam in beams:
            beam.score = (
                beam.cumulative_logprob
                / max(1, beam.parent.num_output_tokens) ** self.params.length_penalty
            )
        return sorted(self.results + beams, key=lambda beam: -beam.score)[: self.params.beam_width]

    def _is_decided(self, best: Beam, length: int) -> bool:
        """Whether there are `beam_width` results and no running beam is expected to get a better score."""
        if len(self.results) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.max_output_tokens  # the length that gives the best score
        return (
            best.cumulative_logprob / length**self.params.length_penalty <= self.results[-1].score
        )


def take_beams(request: Request, likeliest: Likeliest, block_manager: BlockManager) -> None:
    """Processes a step's result for a request whose sequences are beams: the most likely next tokens of each.

    It only forks and frees: every new beam forks from its parent, then all parents are freed.
    """
    if likeliest[0][0].num_output_tokens == 0:
        likeliest = likeliest[:1]  # right after the prompt, all beams are the same
    candidates = [
        Beam(seq, token_id, seq.cumulative_logprob + logprob)
        for seq, logprobs in likeliest
        for token_id, logprob in logprobs.items()
    ]
    assert request.beam_search is not None
    search, children = copy(request.beam_search), list[Sequence]()
    for beam in search.advance(candidates):
        tokens = beam.parent.token_ids[: len(request.prompt_token_ids)] + beam.token_ids
        child = Sequence(request, len(children), tokens, cumulative_logprob=beam.cumulative_logprob)
        block_manager.fork(beam.parent, child)
        children.append(child)
    for seq in request.sequences:
        block_manager.free(seq)
    request.sequences, request.beam_search = (
        children,
        search,
    )  # in one statement: a Ctrl-C changes both or neither
