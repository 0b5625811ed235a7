"""The modules of the package, and what they import.

Tests import this file. An example that does: pytest tests/house/test_house.py
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "nanovllm"


def name_of(path: Path) -> str:
    return ".".join(("nanovllm", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


MODULES = {name_of(path): ast.parse(path.read_bytes()) for path in PACKAGE.rglob("*.py")}


def imported(node: ast.AST, everywhere: bool) -> set[str]:
    """Our modules that a module imports when it is loaded; with `everywhere` also what its functions import, and
    what it imports for its types only, under `if TYPE_CHECKING:`.
    """
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom) and child.module:
            names = {f"{child.module}.{alias.name}" for alias in child.names}
            found |= names & MODULES.keys() or {child.module}
        elif everywhere or not (isinstance(child, ast.FunctionDef) or is_for_types(child)):
            found |= imported(child, everywhere)
    return {name for name in found if name in MODULES}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
