"""No text depends on a system's encoding.

Run: pytest tests/house/test_systems.py
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = {
    file.relative_to(ROOT).as_posix(): ast.parse(file.read_bytes())
    for pattern in ("nanovllm/**/*.py", "tutorials/**/*.py", "*.py")
    for file in ROOT.glob(pattern)
}


def texts_without_encoding(tree: ast.AST) -> list[int]:
    """The lines that open, read or write a text in the encoding that the system prefers."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not any(one.arg == "encoding" for one in node.keywords):
            match node.func:
                case ast.Attribute(attr="read_text" | "write_text"):
                    lines.append(node.lineno)
                case ast.Attribute(value=ast.Name(id="os"), attr="open"):
                    pass  # a descriptor
                case ast.Attribute(value=ast.Name(id="self")):
                    pass  # a method of ours
                case ast.Name(id="open") | ast.Attribute(attr="open" | "fdopen"):
                    modes = [one.value for one in node.args if isinstance(one, ast.Constant)]
                    lines += [] if any("b" in str(mode) for mode in modes) else [node.lineno]
    return lines


def test_a_text_names_its_encoding():
    assert {
        name: lines for name, tree in TREES.items() if (lines := texts_without_encoding(tree))
    } == {}
