"""A model without torch: its KV cache holds, in every slot, the whole prefix that a real key would
depend on.

Reading a wrong, stale or unwritten slot therefore gives a wrong prefix, and from it a wrong token.

Tests import this file. An example that does: pytest tests/core/test_scheduler.py
"""

import random
import zlib

from nanovllm.sequence import Sequence
from nanovllm.topics.decoding.beam_search import Beam
from nanovllm.topics.decoding.drafts import Proposer, SpeculativeConfig


def next_token(prefix: tuple[int, ...], seed: int, vocab_size: int) -> int:
    return zlib.crc32(repr((prefix, seed)).encode()) % vocab_size


def likeliest(prefix: tuple[int, ...], count: int, vocab_size: int) -> dict[int, float]:
    """The `count` likeliest next tokens with their log-probabilities; all different, so that there
    is one order."""
    scores = {}
    for token in range(vocab_size):
        scores[token] = -zlib.crc32(repr((prefix, token)).encode()) / 2**30
    return dict(sorted(scores.items(), key=lambda item: -item[1])[:count])


class FakeRunner:
    """Also the runner of an engine: LLM(runner=FakeRunner(...))."""

    is_asynchronous = False

    def close(self) -> None:
        self.cache.clear()

    def __init__(
        self, block_size: int, vocab_size: int = 3, num_blocks: int = 0, num_host_blocks: int = 0
    ):
        self.block_size, self.vocab_size = block_size, vocab_size
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        # (block, offset) -> prefix that ends here
        self.cache: dict[tuple[int, int], tuple[int, ...]] = {}
        self.host: dict[int, list] = {}  # host block -> what it holds
        self.drawn: list[int] = []  # by the last step

    def slot(self, seq, i: int) -> tuple[int, int]:
        return seq.block_table[i // self.block_size], i % self.block_size

    def token_ids(self, seq) -> list[int]:
        """With overlap, the last one may be pending: it is what the last step drew."""
        *known, last = seq.token_ids
        return [*known, self.drawn[-2 - last] if last < 0 else last]

    def write(self, seq, start: int, num_tokens: int) -> None:
        token_ids = self.token_ids(seq)
        for i in range(start, start + num_tokens):
            self.cache[self.slot(seq, i)] = tuple(token_ids[: i + 1])

    def read(self, block) -> list:
        return [self.cache.get((block, i)) for i in range(self.block_size)]

    def overwrite(self, block, values) -> None:
        self.cache |= {(block, i): value for i, value in enumerate(values)}

    def copy(self, copies) -> None:
        """All sources are read before a target is written."""
        contents = [self.read(source) for source, _ in copies]
        for values, (_, target) in zip(contents, copies):
            self.overwrite(target, values)

    def swap(self, swaps_out, swaps_in) -> None:
        for block, host_block in swaps_out.items():
            self.host[host_block] = self.read(block)
        for host_block, block in swaps_in.items():
            self.overwrite(block, self.host[host_block])

    def check(self, seq) -> None:
        """Every computed token of the sequence is in the cache, and is its own."""
        token_ids = self.token_ids(seq)
        for i in range(seq.num_computed_tokens):
            assert i < len(seq.block_table) * self.block_size, f"{seq} has no block for token {i}"
            found = self.cache.get(self.slot(seq, i))
            place = f"block {seq.block_table[i // self.block_size]}"
            assert found == tuple(token_ids[: i + 1]), f"{seq}: {place} does not hold token {i}"

    def launch(self, schedule):
        result = self.run(schedule)  # now: a later step may be planned before the result is read
        return lambda: result

    def run(self, schedule) -> tuple[list[int], list[dict[int, float] | None]]:
        """A token for each of `schedule.sampled`, and the likeliest ones for beams."""
        self.swap(schedule.moves.swaps_out, schedule.moves.swaps_in)
        self.copy(schedule.moves.copies)
        for item in schedule.items:  # as in a layer: all is written before anything is read
            self.write(*item)
        for item in schedule.items:
            self.check(item.seq)
        prefixes = [
            (seq, self.cache[self.slot(source, len(seq) - 1)])
            for seq, source in schedule.sampled.items()
        ]
        tokens = []
        logprobs = []
        for seq, prefix in prefixes:
            tokens.append(next_token(prefix, seq.seed, self.vocab_size))
            count = seq.request.num_logprobs
            wants_some = count is not None
            logprobs.append(likeliest(prefix, count, self.vocab_size) if wants_some else None)
        self.drawn = tokens
        return tokens, logprobs


class Oracle(Proposer):
    """Guesses what the model will draw, and is often right."""

    def __init__(self, rng: random.Random, vocab_size: int, right: float = 0.8):
        super().__init__(SpeculativeConfig(num_speculative_tokens=rng.randint(1, 8)))
        self.rng, self.vocab_size, self.right = rng, vocab_size, right

    def propose(self, seq: Sequence, most: int) -> list[int]:
        prefix = [*seq.token_ids]
        for _ in range(self.rng.randint(0, most)):
            right = next_token(tuple(prefix), seq.seed, self.vocab_size)
            is_right = self.rng.random() < self.right
            prefix.append(right if is_right else self.rng.randrange(self.vocab_size))
        return prefix[len(seq) :]


def expected_output(request, index: int, max_model_len: int, vocab_size: int) -> list[int]:
    """What the fake model says when nothing is batched, paged or cached."""
    tokens = list(request.prompt_token_ids)
    seed = request.sequences[index].seed
    max_len = min(len(tokens) + request.params.max_tokens, max_model_len)
    while len(tokens) < max_len:
        tokens.append(next_token(tuple(tokens), seed, vocab_size))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[len(request.prompt_token_ids) :]


def expected_beams(request, search, vocab_size: int) -> list[tuple[list[int], float]]:
    """What a new `search` finds when nothing is batched, paged or cached: (output tokens,
    log-probability)."""
    beams = [Sequence(request, 0, list(request.prompt_token_ids))]
    while beams:
        candidates = []
        for beam in beams:
            next_tokens = likeliest(tuple(beam.token_ids), search.num_candidates, vocab_size)
            for token, logprob in next_tokens.items():
                candidates.append(Beam(beam, token, beam.cumulative_logprob + logprob))
        children = []
        for beam in search.advance(candidates):
            tokens = [*beam.parent.token_ids, beam.token_id]
            logprob = beam.cumulative_logprob
            children.append(Sequence(request, 0, tokens, cumulative_logprob=logprob))
        beams = children
    return [(beam.token_ids, beam.cumulative_logprob) for beam in search.results]
