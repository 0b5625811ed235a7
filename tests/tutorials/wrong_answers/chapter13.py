"""Answers to the exercises of chapter 13 that must not pass: exercise, code, a part of what is said."""

WRONG = {
    "the last token is computed, too": (
        "13.1",
        """
def blocks_at_most(prompt, answer, n, block_size):
    shared = prompt // block_size
    return shared + n * (math.ceil((prompt + answer) / block_size) - shared)
""",
        "samples of .* blocks are held at most, but you say",
    ),
    "the block that is not full is shared, too": (
        "13.1",
        """
def blocks_at_most(prompt, answer, n, block_size):
    shared = math.ceil(prompt / block_size)
    return shared + n * (math.ceil((prompt + answer - 1) / block_size) - shared)
""",
        "47 blocks are held at most, but you say",
    ),
    "own blocks as if the prompt ended with a block": (
        "13.1",
        """
def blocks_at_most(prompt, answer, n, block_size):
    return prompt // block_size + n * math.ceil((answer - 1) / block_size)
""",
        "blocks are held at most, but you say",
    ),
    "siblings in the order of the list": (
        "13.2",
        """
def diverse(candidates, width, gamma):
    ranked, num_siblings = [], Counter()
    for candidate in candidates:
        ranked.append((candidate.logprob - gamma * num_siblings[candidate.parent], candidate))
        num_siblings[candidate.parent] += 1
    return [c for _, c in sorted(ranked, key=lambda pair: -pair[0])[:width]]
""",
        "but should be",
    ),
    "the lowered numbers are kept": (
        "13.2",
        """
def diverse(candidates, width, gamma):
    ranked, num_siblings = [], Counter()
    for c in sorted(candidates, key=lambda c: -c.logprob):
        ranked.append(c._replace(logprob=c.logprob - gamma * num_siblings[c.parent]))
        num_siblings[c.parent] += 1
    return sorted(ranked, key=lambda c: -c.logprob)[:width]
""",
        "a candidate has changed: its logprob is",
    ),
    "one child of each parent": (
        "13.2",
        """
def diverse(candidates, width, gamma):
    best = {}
    for c in sorted(candidates, key=lambda c: -c.logprob):
        best.setdefault(c.parent, c)
    return list(best.values())[:width]
""",
        "but should be",
    ),
    "gamma does nothing": (
        "13.2",
        "def diverse(candidates, width, gamma): return sorted(candidates, key=lambda c: -c.logprob)[:width]",
        "gamma 0.8.* but should be",
    ),
    "each writer into a shared block copies": (
        "13.3",
        """
def blocks_needed(manager, seqs):
    needed = 0
    for seq in seqs:
        place = seq.num_computed_tokens // manager.block_size
        if place == len(seq.block_table) or manager.blocks[seq.block_table[place]].ref_count > 1:
            needed += 1
    return needed
""",
        "three samples of a prompt of 6 tokens write: that takes 2 free blocks, but you say 3",
    ),
    "one writer never copies": (
        "13.3",
        """
def blocks_needed(manager, seqs):
    needed, writers = 0, Counter()
    for seq in seqs:
        place = seq.num_computed_tokens // manager.block_size
        if place == len(seq.block_table):
            needed += 1
        else:
            writers[seq.block_table[place]] += 1
    return needed + sum(num_writers - 1 for num_writers in writers.values())
""",
        "two of three samples of a prompt of 6 tokens write: that takes 2 free blocks, but you say 1",
    ),
    "all owners copy, also those that do not write": (
        "13.3",
        """
def blocks_needed(manager, seqs):
    needed, shared = 0, set()
    for seq in seqs:
        place = seq.num_computed_tokens // manager.block_size
        if place == len(seq.block_table):
            needed += 1
        else:
            shared.add(seq.block_table[place])
    return needed + sum(manager.blocks[i].ref_count - 1 for i in shared)
""",
        "one of three samples of a prompt of 6 tokens writes: that takes 1 free blocks, but you say 2",
    ),
    "the last block in place of the next one": (
        "13.3",
        """
def blocks_needed(manager, seqs):
    needed, writers = 0, Counter()
    for seq in seqs:
        if seq.num_computed_tokens >= len(seq.block_table) * manager.block_size:
            needed += 1
        else:
            writers[seq.block_table[-1]] += 1
    return needed + sum(min(n, manager.blocks[i].ref_count - 1) for i, n in writers.items())
""",
        "which has a block ahead: that takes 1 free blocks, but you say 0",
    ),
    "the end of a block always needs a new one": (
        "13.3",
        """
def blocks_needed(manager, seqs):
    needed, writers = 0, Counter()
    for seq in seqs:
        place = seq.num_computed_tokens // manager.block_size
        if seq.num_computed_tokens % manager.block_size == 0:
            needed += 1
        else:
            writers[seq.block_table[place]] += 1
    return needed + sum(min(n, manager.blocks[i].ref_count - 1) for i, n in writers.items())
""",
        "which has a block for it: that takes 0 free blocks, but you say 1",
    ),
    "no new blocks": (
        "13.3",
        """
def blocks_needed(manager, seqs):
    writers = Counter()
    for seq in seqs:
        place = seq.num_computed_tokens // manager.block_size
        if place < len(seq.block_table):
            writers[seq.block_table[place]] += 1
    return sum(min(n, manager.blocks[i].ref_count - 1) for i, n in writers.items())
""",
        "prompt of 8 tokens write: that takes 3 free blocks, but you say 0",
    ),
    "it writes, and counts": (
        "13.3",
        """
def blocks_needed(manager, seqs):
    before = manager.num_free_blocks
    for seq in seqs:
        manager.allocate(seq, 1)
    return before - manager.num_free_blocks
""",
        "it may only look",
    ),
}
