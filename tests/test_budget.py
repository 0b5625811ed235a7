"""The line budget of the design: code is what remains without blank lines, comments and docstrings."""

import ast
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "nanovllm"
INVISIBLE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in INVISIBLE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_the_counter_counts():
    assert (
        code_lines(
            '"""Doc\nstring."""\n\n# comment\nx = (1 +\n     2)  # why\n\ndef f():\n    "doc"\n    return """a\nb"""\n'
        )
        == 5
    )


def test_line_budget():
    counts = {path.relative_to(PACKAGE): code_lines(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert max(counts.values()) <= 300, counts
    assert sum(counts.values()) <= 2200, counts
