"""The words of a chapter: those that are read one by one."""

import re

FENCE = re.compile(r"^ *```.*?^ *```\n", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)


def first_reading(text: str) -> str:
    """A chapter without what is folded."""
    return FOLDED.sub("", text)


def prose(text: str) -> str:
    """What a reader reads word by word: no code, no output, no table, no address of a link."""
    text = FENCE.sub("", first_reading(text))
    text = re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)\n", "", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def num_words(text: str) -> int:
    return len(prose(text).split())


def minutes(text: str) -> int:
    """To read a page: one for each hundred words, which is slow enough for a second language, one
    for each block of Python with its output, one for each table."""
    shown = first_reading(text)
    num_blocks = len(re.findall(r"^ *```python", shown, re.MULTILINE))
    num_tables = len(TABLE.findall(FENCE.sub("", shown)))
    return max(1, round(num_words(text) / 100) + num_blocks + num_tables)
