"""The line budget of the design: code is what remains without blank lines, comments and docstrings.

The engine is everything that a call of LLM.generate can run through. The rest of the package stands around it: statistics,
the cost model, the simulator, what a backend is and what it is tested against, and the loader, which is done before there is an engine.

Run: pytest tests/test_budget.py
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

from nanovllm import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanovllm"
AROUND_THE_ENGINE = (
    "stats.py",
    "roofline.py",
    "simulator.py",
    "loader.py",
    "layers/attention.py",
    "layers/ops.py",
)
INVISIBLE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in INVISIBLE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
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
    counts = {
        str(path.relative_to(PACKAGE)): code_lines(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }
    assert max(counts.values()) <= 300, counts
    assert sum(n for name, n in counts.items() if name not in AROUND_THE_ENGINE) <= 2200, counts
    assert sum(counts.values()) <= 2800, counts


def test_generate_runs_through_the_engine_only():
    """What counts as the engine: all that a call of LLM.generate can run through."""
    llm, seen = LLM(num_blocks=100), set()

    def profile(frame, event, arg):
        seen.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        llm.generate(["a b"], SamplingParams(n=2, max_tokens=5), use_tqdm=False)
    finally:
        sys.setprofile(None)
    run = {str(Path(name).relative_to(PACKAGE)) for name in seen if name.startswith(str(PACKAGE))}
    assert {"engine.py", "scheduler.py", "model_runner.py", "layers/torch_attention.py"} <= run
    assert not run & set(AROUND_THE_ENGINE)


def test_the_benchmark_is_short():
    assert len((ROOT / "bench.py").read_text().splitlines()) < 300
