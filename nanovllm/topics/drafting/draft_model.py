"""DraftModel: a small model of the same vocabulary proposes draft tokens (Leviathan et al., 2023).

It computes the tokens of every step, too, before the model that checks its drafts. Its keys and
values lie in a cache of its own, in blocks with the same ids: a block table, a prefix that is found
in the cache, a copy or a swap means the same for both. Where the draft model lacks a token, its
drafts get worse, and no answer changes.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from nanovllm.block_manager import Moves
from nanovllm.config import Config, Limits
from nanovllm.loader import find_model, has_states, load_config
from nanovllm.model_runner import ModelRunner
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Sequence
from nanovllm.topics.decoding.drafts import (
    Draft,
    PromptLookup,
    Proposer,
    SpeculativeConfig,
    config_of,
    without_draft,
)

logger = logging.getLogger(__name__)


def new_proposer(fields: dict[str, Any]) -> Proposer:
    """The proposer that the fields of a SpeculativeConfig name."""
    config = config_of(fields)
    return PromptLookup(config) if config.model is None else DraftModel(config)


class DraftModel(Proposer):
    """Proposes what the draft model samples, with the parameters, seed and positions of the
    request: so its random numbers are those with which the other model samples."""

    def __init__(self, config: SpeculativeConfig):
        super().__init__(config)
        self.runner: ModelRunner | None = None
        # tokens of a sequence whose keys the draft model has, by the last step
        self.num_known: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def load(
        self, config: Config, limits: Limits, hf_config, path: Path, device: torch.device
    ) -> ModelRunner:
        """The draft model, with a cache of one block: ModelRunner.start makes the real one. Raises
        ValueError for what a draft model does not go with."""
        num_ranks = config.tensor_parallel_size
        config.require("tensor_parallel_size", num_ranks == 1, "1 with a draft model")
        is_paged = config.attention_backend != "vattention"
        config.require("attention_backend", is_paged, "another one with a draft model")
        own_path = find_model(str(self.config.model))
        own = load_config(own_path)
        require = self.config.require
        require("model", not has_states(own), "a model whose layers have no states")
        size = hf_config.vocab_size
        allowed = f"a model with the vocabulary of {path}, {size} tokens, not {own.vocab_size}"
        require("model", own.vocab_size == size, allowed)
        config = replace(
            config,
            model=str(own_path),
            num_blocks=1,
            preemption_mode="recompute",
            enforce_eager=True,
            speculative_config=None,
        )
        # behind a draft that was right as a whole, two tokens are missing
        limits = replace(limits, num_drafts=1)
        self.runner = ModelRunner(config, limits, own, own_path, device)
        return self.runner

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Places for tokens: see fill_in."""
        return [0] * most if self.runner is not None else []

    def fill_in(self, schedule: Schedule, moves: Moves) -> None:
        """Samples the tokens of all drafts. If this fails, there are no drafts from now on, and
        what the drafts of this step have is rejected."""
        if self.runner is None or not (schedule.items or moves):
            return
        try:
            self._compute(self.runner, schedule, moves)
        except Exception as error:
            logger.warning("the draft model has failed: no more draft tokens: %r", error)
            self.runner = None

    def _compute(self, runner: ModelRunner, schedule: Schedule, moves: Moves) -> None:
        """First the tokens of the step, and a token for each draft; then one decode of all drafts
        for each further token."""
        texts: dict[Sequence, list[Sequence]] = {}  # a sequence, with one draft token, with two ...
        for row in schedule.sampled:
            if isinstance(row, Draft):
                texts.setdefault(row.seq, [row.seq]).append(row)
        step = Schedule(moves=moves, sampled={seq: seq for seq in texts})
        for row, start, num_tokens in schedule.items:
            seq = without_draft(row)
            end = min(start + num_tokens, len(seq))
            begin = min(start, self.num_known.get(seq, start))
            step.items.append(Item(seq, begin, end - begin))
            self.num_known[seq] = end if row is seq else len(row) - 1
        place = 0  # of the tokens that are sampled next, in their drafts
        while step.items or step.moves:
            token_ids, _ = runner.launch(step)()
            for row, token_id in zip(step.sampled, token_ids):
                for longer in texts[without_draft(row)][place + 1 :]:
                    longer.token_ids[len(row)] = token_id
            place += 1
            step = Schedule()
            for rows in texts.values():
                if len(rows) > place + 1:
                    row = rows[place]
                    step.add(Item(row, len(row) - 1, 1))
