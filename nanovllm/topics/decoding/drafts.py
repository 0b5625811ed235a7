"""Drafts: tokens that may come next, so that one step can check several of them.

Speculative decoding (Leviathan et al., 2023). A step computes the draft tokens behind a sequence's
last token, and samples a token after each of them as if there were no draft: random numbers depend
on seed and position alone. A draft token is accepted while it is the token that was sampled before
it. So the tokens are the same with and without drafts. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from nanovllm.block_manager import BlockManager, Moves
from nanovllm.config import Config
from nanovllm.options import Options, Rule, integer
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import NewTokens, Request, Sequence

AT_ONCE = 1024  # tokens of a text whose places are noted: a long prompt holds no step up
FEW = integer(1, 16, "an integer from 1 to 16")


@dataclass(kw_only=True)
class SpeculativeConfig(Options):
    """How draft tokens are proposed. The names are those of vLLM."""

    method: str | None = None
    """With "ngram", what followed the last tokens when they came for the first time (prompt lookup:
    Saxena, 2023). With "draft_model", what a small model samples. Default: "draft_model" if there
    is a `model`."""

    model: str | None = None
    """The draft model: a directory or a hub id, with the vocabulary of the engine's model. Dtype,
    quantization and backend are chosen for it as for that one."""

    num_speculative_tokens: int = 4
    """Maximum draft tokens for a sequence in a step."""

    prompt_lookup_max: int = 4
    """The most last tokens to look for."""

    prompt_lookup_min: int = 2
    """The fewest last tokens to look for."""

    RULES: ClassVar[dict[str, Rule]] = {
        "method": Rule(
            lambda value: value in ("ngram", "draft_model"),
            "'ngram' or 'draft_model' (EAGLE and MTP heads read hidden states: chapter 22)",
        ),
        "model": Config.RULES["model"],
        "num_speculative_tokens": integer(1, 64, "an integer from 1 to 64"),
        "prompt_lookup_max": FEW,
        "prompt_lookup_min": FEW,
    }

    def __post_init__(self):
        super().__post_init__()
        if self.method is None:
            self.method = "ngram" if self.model is None else "draft_model"
        has_model = self.model is not None
        allowed = "a draft model with method='draft_model', and only then"
        self.require("model", has_model == (self.method == "draft_model"), allowed)
        most = self.prompt_lookup_max
        allowed = f"at most prompt_lookup_max={most}"
        self.require("prompt_lookup_min", self.prompt_lookup_min <= most, allowed)


class Lookup:
    """The first place of each n-gram in a text. Grows with the text."""

    def __init__(self, config: SpeculativeConfig):
        self.sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self.ends: dict[tuple[int, ...], int] = {}  # of an n-gram: the place behind it
        self.num_tokens = 0  # whose n-grams are known

    def propose(self, token_ids: Tokens[int], most: int) -> Tokens[int]:
        """The tokens that followed the longest of the last n-grams, up to `most`; an empty list if
        none was found. Notes the places of at most AT_ONCE new tokens. The last n-gram of the text
        is not noted: nothing follows it yet."""
        new = range(self.num_tokens + 1, len(token_ids))[:AT_ONCE]
        for end in new:
            for size in self.sizes:
                if size <= end:
                    self.ends.setdefault(tuple(token_ids[end - size : end]), end)
        self.num_tokens += len(new)
        for size in self.sizes:
            begin = self.ends.get(tuple(token_ids[-size:]))
            if begin is not None:
                return token_ids[begin : begin + most]
        return []


class Draft(Sequence):
    """A sequence as it will be if its draft tokens are accepted. It samples the token behind
    them."""

    def __init__(self, seq: Sequence, token_ids: list[int]):
        super().__init__(seq.request, seq.index, token_ids)
        self.seq = seq
        self.place = len(token_ids) - len(seq)
        self.num_computed_tokens = seq.num_computed_tokens
        self.block_table = seq.block_table


def without_draft(row: Sequence) -> Sequence:
    """The sequence itself, without its draft tokens."""
    return row.seq if isinstance(row, Draft) else row


class Proposer:
    """Adds draft tokens to steps that have been planned, and accepts those that were right.
    Subclasses propose the tokens."""

    def __init__(self, config: SpeculativeConfig):
        self.config = config
        self.num_drafts = 0  # how often a sequence had draft tokens
        self.num_draft_tokens = 0
        self.num_accepted = Counter[int]()  # by place: 1 is a sequence's first draft token

    @property
    def stats(self) -> dict[str, float]:
        """Counters since the start: drafts, their tokens, and how many of these were accepted, also
        by place."""
        accepted = self.num_accepted
        by_place = {f"accepted_draft_tokens_{place}": n for place, n in sorted(accepted.items())}
        made = {"drafts": self.num_drafts, "draft_tokens": self.num_draft_tokens}
        return {**made, "accepted_draft_tokens": accepted.total(), **by_place}

    def propose(self, seq: Sequence, most: int) -> Tokens[int]:
        """Up to `most` tokens that may follow."""
        return []

    def load(self, *arguments: Any) -> Any:
        """The ModelRunner of a draft model; None without one. Takes what ModelRunner takes."""
        return None

    def fill_in(self, schedule: Schedule, moves: Moves) -> None:
        """Called when all drafts have their blocks. May still replace their tokens."""

    def add_drafts(
        self,
        schedule: Schedule,
        running: list[Request],
        manager: BlockManager,
        num_wanted: Callable[[Request], int],
    ) -> None:
        """Takes only tokens that the step has left, and blocks that are free: the next step finds
        them free again, unless the draft tokens are accepted. `num_wanted` is the policy:
        Scheduler.num_draft_tokens.

        A sequence that samples gets drafts, also behind the last token of its prompt. Its item
        becomes that of its longest draft, and `schedule.sampled` has the sequence and each draft,
        all with the longest one. No draft reaches max_len. Blocks that sequences before their fork
        will need are left alone. At the end, `fill_in` is called.
        """
        waiting = [request for request in running if not request.has_forked]
        promised = sum(map(manager.num_blocks_at_fork, waiting))
        for i, (seq, start, num_tokens) in enumerate(schedule.items):
            if schedule.sampled.get(seq) is not seq or not allows_drafts(seq.request):
                continue
            wanted = num_wanted(seq.request)
            num_blocks = len(seq.block_table) + manager.num_free_blocks - promised
            room = num_blocks * manager.block_size
            longest = min(room, seq.request.max_len - 1)
            most = min(wanted, schedule.tokens_left, longest - len(seq))
            rows = self.rows(seq, most) if most > 0 else []
            if rows:
                while len(seq.block_table) * manager.block_size < len(rows[-1]):
                    seq.block_table.append(manager.take_block().id)
                schedule.items[i] = Item(rows[-1], start, num_tokens + len(rows))
                schedule.sampled |= dict.fromkeys([seq, *rows], rows[-1])
                schedule.tokens_left -= len(rows)
        self.fill_in(schedule, manager.moves)

    def rows(self, seq: Sequence, most: int) -> list[Draft]:
        """The sequence with one draft token, with two, and so on."""
        token_ids = seq.token_ids
        rows = []
        for token_id in self.propose(seq, most)[:most]:
            token_ids = [*token_ids, token_id]
            rows.append(Draft(seq, token_ids))
        return rows

    def accepted(self, schedule: Schedule, manager: BlockManager, drawn: NewTokens) -> NewTokens:
        """The sequences with the tokens that count: what a draft has sampled counts if the sequence
        has become this draft. Only these rows are left in the schedule.

        The caller appends each token to its sequence before it takes the next row. `drawn` reads
        schedule.sampled: make a list of it first. Sets `num_computed_tokens`, which the scheduler
        has done for the longest draft only, and caches full blocks. In the end, blocks behind the
        sequence's last token are freed.
        """
        for row, token_id, likeliest in [*drawn]:
            source = schedule.sampled[row]
            if not isinstance(source, Draft):
                yield row, token_id, likeliest
                continue
            seq = source.seq
            is_right = seq.finish_reason is None and seq.token_ids == row.token_ids
            if not is_right:
                del schedule.sampled[row]
                continue
            if isinstance(row, Draft):
                self.num_accepted[row.place] += 1
            seq.num_computed_tokens = len(row)
            manager.cache_full_blocks(seq, len(row))
            yield seq, token_id, likeliest
        for row, _, _ in schedule.items:
            if isinstance(row, Draft):  # gives back the blocks behind the last token
                self.num_drafts += 1
                self.num_draft_tokens += row.place
                end = manager.num_blocks_for(len(row.seq))
                row.block_table = row.seq.block_table[end:]
                del row.seq.block_table[end:]
                manager.free(row)


class PromptLookup(Proposer):
    """Proposes what followed the last tokens before."""

    def __init__(self, config: SpeculativeConfig):
        super().__init__(config)
        self.lookups: WeakKeyDictionary[Sequence, Lookup] = WeakKeyDictionary()

    def propose(self, seq: Sequence, most: int) -> Tokens[int]:
        lookup = self.lookups.get(seq)
        if lookup is None or lookup.num_tokens >= len(seq):  # it has lost tokens, in a fault
            lookup = self.lookups[seq] = Lookup(self.config)
        return lookup.propose(seq.token_ids, most)


def config_of(fields: dict[str, Any]) -> SpeculativeConfig:
    """Raises ValueError if a field is wrong."""
    named = {str(name): value for name, value in fields.items()}
    return SpeculativeConfig(**named)


def allows_drafts(request: Request) -> bool:
    """Whether the request may have draft tokens: beams may not, and neither may a prompt that is
    still scored."""
    is_drawn = request.has_forked and not request.is_search
    return is_drawn and not request.lacks_prompt_logprobs
