"""Size of a source file in lines and tokens, without comments, docstrings and line ends.

Tests import this file. An example that does: pytest tests/house/test_budget.py
"""

import ast
import io
import tokenize
from collections import Counter
from typing import NamedTuple

UNSEEN = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """Of a source file. A string over several lines counts as a line for each of them."""

    lines: int
    tokens: int
    longest_line: int  # in tokens
    widest_line: int  # in columns, comments and docstrings included
    crowded: list[int]  # lines that assign three or more values at a time


def docstring_lines(tree: ast.AST) -> set[int]:
    """Also of the strings below fields, which say what they mean."""
    found: set[int] = set()
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_string and isinstance(node.value.value, str):
            found.update(range(node.lineno, node.end_lineno + 1))
    return found


def size_of(source: str) -> Size:
    tree = ast.parse(source)
    unseen_lines = docstring_lines(tree)
    tokens_of_line, lines, num_open = Counter(), set(), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        num_open -= kind == "FSTRING_END"
        if token.type not in UNSEEN and token.start[0] not in unseen_lines:
            lines.update(range(token.start[0], token.end[0] + 1))
            if num_open == 0 and kind != "FSTRING_END":  # an f-string is one token, as before 3.12
                tokens_of_line[token.start[0]] += 1
        num_open += kind == "FSTRING_START"
    crowded = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and len(node.value.elts) >= 3
    ]
    return Size(
        lines=len(lines),
        tokens=tokens_of_line.total(),
        longest_line=max(tokens_of_line.values(), default=0),
        widest_line=max(map(len, source.splitlines()), default=0),
        crowded=crowded,
    )
