"""A model without torch: its KV cache holds, in every slot, the whole prefix that a real key would depend on.

Reading a wrong, stale or unwritten slot therefore gives a wrong prefix, and from it a wrong token.
"""

import zlib


def next_token(prefix: tuple[int, ...], seed: int, vocab_size: int) -> int:
    return zlib.crc32(repr((prefix, seed)).encode()) % vocab_size


class FakeRunner:
    def __init__(self, block_size: int, vocab_size: int = 3):
        self.block_size, self.vocab_size = block_size, vocab_size
        self.cache: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> prefix that ends here

    def slot(self, seq, i: int) -> tuple[int, int]:
        return seq.block_table[i // self.block_size], i % self.block_size

    def write(self, seq, num_tokens: int) -> None:
        for i in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
            self.cache[self.slot(seq, i)] = tuple(seq.token_ids[: i + 1])

    def copy(self, copies) -> None:
        """All sources are read before a target is written."""
        read = [[self.cache.get((source, i)) for i in range(self.block_size)] for source, _ in copies]
        for values, (_, target) in zip(read, copies):
            self.cache |= {(target, i): value for i, value in enumerate(values)}

    def check(self, seq) -> None:
        """Every computed token of the sequence is in the cache, and is its own."""
        for i in range(seq.num_computed_tokens):
            assert self.cache[self.slot(seq, i)] == tuple(seq.token_ids[: i + 1])

    def run(self, schedule) -> list[int]:
        sampled = schedule.sampled_items
        self.copy(schedule.copies)
        for seq, num_tokens in schedule.items:
            self.check(seq)
            self.write(seq, num_tokens)
        prefixes = [self.cache[self.slot(schedule.items[i][0], len(seq) - 1)] for i, seq in sampled]
        return [next_token(prefix, seq.seed, self.vocab_size) for prefix, (_, seq) in zip(prefixes, sampled)]


def expected_output(request, index: int, max_model_len: int, vocab_size: int) -> list[int]:
    """What the fake model says when nothing is batched, paged or cached."""
    tokens, seed = list(request.prompt_token_ids), request.sequences[index].seed
    while len(tokens) - len(request.prompt_token_ids) < request.params.max_tokens and len(tokens) < max_model_len:
        tokens.append(next_token(tuple(tokens), seed, vocab_size))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[len(request.prompt_token_ids) :]
