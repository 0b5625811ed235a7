"""Answers to the exercises of chapter 07 that must not pass: exercise, code, a part of what is said."""

ROWS = """
def rows_to_check(counts, num_guesses):
    rows, end = [], 0
    for count, guesses in zip(counts, num_guesses):
        end += count
        rows += range(end - guesses - 1, end)
    return rows
"""

WRONG = {
    "the block's place is its number": (
        "07.1",
        """
def arrays(token_ids, start, num_tokens, block_table, block_size):
    positions = list(range(start, start + num_tokens))
    return positions, positions, start + num_tokens, start + num_tokens == len(token_ids)
""",
        r"the slots should be \[10, 11\], but you say \[6, 7\]",
    ),
    "the context before the step": (
        "07.1",
        """
def arrays(token_ids, start, num_tokens, block_table, block_size):
    positions = list(range(start, start + num_tokens))
    slots = [block_table[i // block_size] * block_size + i % block_size for i in positions]
    return positions, slots, start, start + num_tokens == len(token_ids)
""",
        "the context should be 8, but you say 6",
    ),
    "each chunk is sampled": (
        "07.1",
        """
def arrays(token_ids, start, num_tokens, block_table, block_size):
    positions = list(range(start, start + num_tokens))
    slots = [block_table[i // block_size] * block_size + i % block_size for i in positions]
    return positions, slots, start + num_tokens, True
""",
        "whether a row is sampled should be False, but you say True",
    ),
    "a chunk of one token is a decode": (
        "07.1",
        """
def arrays(token_ids, start, num_tokens, block_table, block_size):
    end = start + num_tokens
    positions = list(range(start, end))
    slots = [block_table[i // block_size] * block_size + i % block_size for i in positions]
    return positions, slots, end, num_tokens == 1 or end == len(token_ids)
""",
        r"1 of 9 tokens from 4 on, .* whether a row is sampled should be False, but you say True",
    ),
    "int64, as torch makes it": (
        "07.2",
        """
def rectangle(block_tables, cu_blocks):
    counts = cu_blocks.diff().long()
    row = torch.repeat_interleave(counts)
    tables = torch.full((len(counts), int(counts.max())), -1)
    tables[row, torch.arange(len(block_tables)) - cu_blocks[row]] = block_tables.long()
    return tables
""",
        r"should be torch\.int32, but is torch\.int64",
    ),
    "a list of each slice": (
        "07.2",
        """
def rectangle(block_tables, cu_blocks):
    ends = cu_blocks.tolist()
    tables = [block_tables[begin:end].tolist() for begin, end in zip(ends, ends[1:])]
    width = max(map(len, tables))
    return torch.tensor(
        [table + [-1] * (width - len(table)) for table in tables], dtype=torch.int32
    )
""",
        "for 1,200 blocks, 1,188 numbers become Python's, more than for 12",
    ),
    "a loop over blocks": (
        "07.2",
        """
def rectangle(block_tables, cu_blocks):
    ends = cu_blocks.tolist()
    tables = torch.full((len(ends) - 1, max(b - a for a, b in zip(ends, ends[1:]))), -1)
    for row, (begin, end) in enumerate(zip(ends, ends[1:])):
        for i in range(begin, end):
            tables[row, i - begin] = block_tables[i]
    return tables
""",
        "for 1,200 blocks, Python runs .* operations more than for 12",
    ),
    "filled up with 0, which is a block": (
        "07.2",
        """
def rectangle(block_tables, cu_blocks):
    counts = cu_blocks.diff().long()
    row = torch.repeat_interleave(counts)
    tables = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
    tables[row, torch.arange(len(block_tables)) - cu_blocks[row]] = block_tables
    return tables
""",
        "it should be .* but is",
    ),
    "each row begins where the last one ended": (
        "07.2",
        """
def rectangle(block_tables, cu_blocks):
    counts = cu_blocks.diff().long()
    row = torch.repeat_interleave(counts)
    tables = torch.full((len(counts), int(counts.max())), -1, dtype=torch.int32)
    tables[row, torch.arange(len(block_tables)) % tables.shape[1]] = block_tables
    return tables
""",
        "it should be .* but is",
    ),
    "only the rows of the guesses": (
        "07.3",
        """
def rows_to_check(counts, num_guesses):
    rows, end = [], 0
    for count, guesses in zip(counts, num_guesses):
        end += count
        rows += range(end - max(guesses, 1), end)
    return rows


def new_tokens(guesses, likeliest):
    return [likeliest]
""",
        r"two guesses, both right: the rows should be \[0, 1, 2\], but you say \[1, 2\]",
    ),
    "the wrong guess is kept": (
        "07.3",
        ROWS
        + """
def new_tokens(guesses, likeliest):
    answers, row = [], 0
    for guess in guesses:
        own = likeliest[row : row + len(guess) + 1]
        row += len(own)
        answers.append([*guess, own[-1]])
    return answers
""",
        "the second is wrong: the new tokens should be",
    ),
    "a right guess after a wrong one counts": (
        "07.3",
        ROWS
        + """
def new_tokens(guesses, likeliest):
    answers, row = [], 0
    for guess in guesses:
        own = likeliest[row : row + len(guess) + 1]
        row += len(own)
        right = sum(a == b for a, b in zip(guess, own))
        answers.append(own[: right + 1])
    return answers
""",
        "the first is wrong: the new tokens should be",
    ),
    "no token of the model's own": (
        "07.3",
        ROWS
        + """
def new_tokens(guesses, likeliest):
    answers, row = [], 0
    for guess in guesses:
        right = 0
        while right < len(guess) and guess[right] == likeliest[row + right]:
            right += 1
        answers.append(guess[:right])
        row += len(guess) + 1
    return answers
""",
        r"no guess: the new tokens should be \[\[7\]\], but you say \[\[\]\]",
    ),
}
