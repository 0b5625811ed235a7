"""The line budget of the design: code is what remains without blank lines, comments and docstrings.

The engine is everything that a call of LLM.generate can run through. The rest of the package stands around it.
"""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanovllm"
AROUND_THE_ENGINE = ("roofline.py",)  # later simulator.py and server.py, too
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


def imported(path: Path) -> set[str]:
    """The modules that a file names in its imports, wherever they stand."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_line_budget():
    counts = {str(path.relative_to(PACKAGE)): code_lines(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert max(counts.values()) <= 300, counts
    assert sum(n for name, n in counts.items() if name not in AROUND_THE_ENGINE) <= 2200, counts
    assert sum(counts.values()) <= 2800, counts


def test_the_engine_needs_nothing_around_it():
    for path in PACKAGE.rglob("*.py"):
        if str(path.relative_to(PACKAGE)) not in AROUND_THE_ENGINE:
            assert not imported(path) & {f"nanovllm.{Path(name).stem}" for name in AROUND_THE_ENGINE}, path


def test_the_benchmark_is_short():
    assert len((ROOT / "bench.py").read_text().splitlines()) < 300
