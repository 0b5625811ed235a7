"""Log-probabilities of the tokens of prompts, each given those before it."""

from collections.abc import Callable
from itertools import chain, islice

import torch
from torch import Tensor

from nanovllm.layers.sampler import top_logprobs
from nanovllm.schedule import Item
from nanovllm.sequence import Request, Sequence
from nanovllm.step import move

ROWS_AT_A_TIME = 256  # the logits of a whole chunk might not fit into memory


def rows_to_score(scored: list[Item], end_of: dict[Sequence, int]) -> Tensor:
    """The places in the batch of the tokens to score, given the end of each sequence in the
    batch."""
    rows = []
    for item in scored:
        begin = end_of[item.seq] - item.num_tokens
        end = begin + num_scored(item)
        rows.append(torch.arange(begin, end))
    return torch.cat(rows)


def num_scored(item: Item) -> int:
    """The number of the item's tokens whose next token is of the prompt, too."""
    end = item.start + item.num_tokens
    last = len(item.seq.request.prompt_token_ids) - 1
    return max(0, min(end, last) - item.start)


def num_wanted(request: Request) -> int:
    return request.params.prompt_logprobs or 0


class PromptScores:
    """The next tokens of these items, scored by the hidden states [N, hidden_size] before them."""

    def __init__(self, scored: list[Item], hidden: Tensor, head: Callable[[Tensor], Tensor]):
        self.scored = scored
        next_ids: list[int] = []
        for item in scored:
            begin = item.start + 1
            end = begin + num_scored(item)
            next_ids += item.seq.token_ids[begin:end]
        ids = move({"ids": torch.tensor(next_ids, dtype=torch.int64)}, hidden.device)["ids"]
        most = max(num_wanted(item.seq.request) for item in scored)
        self.parts: list[tuple[Tensor, Tensor]] = []  # on the device
        for begin in range(0, len(ids), ROWS_AT_A_TIME):
            end = begin + ROWS_AT_A_TIME
            logits = head(hidden[begin:end])
            k = min(most, logits.shape[1])
            self.parts.append(top_logprobs(logits, ids[begin:end], k))

    def deliver(self) -> None:
        """Waits for the device. What a request has from an earlier attempt is replaced."""
        rows = chain.from_iterable(
            zip(ids.tolist(), values.tolist())  # likeliest first
            for values, ids in self.parts
        )
        for item in self.scored:
            request = item.seq.request
            known = request.prompt_logprobs
            num_known = item.start + 1
            del known[num_known:]
            known += [None] * (num_known - len(known))
            num_entries = 1 + num_wanted(request)
            for ids, values in islice(rows, num_scored(item)):
                entries = islice(zip(ids, values), num_entries)
                known.append(dict(entries))
