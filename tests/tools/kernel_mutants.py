"""Do tests notice a wrong kernel? Changes the Triton kernels in one place at a time: a mask is left out, a bound, a stride
or an address is one off. Prints each change that the command does not notice.

Run: python tests/tools/kernel_mutants.py COMMAND...    in a clone that may be changed, for example with
     pytest -q -x tests/core/test_ops.py tests/core/test_kernels.py tests/quantization/test_products.py
     scripts/without_gpu 90 -q -x tests/core/test_ops.py tests/core/test_kernels.py -k 'triton or test_kernels'
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "nanovllm"
OTHER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
STRIDES = "heads num_splits q_stride k_stride v_stride stride row_stride num_blocks".split()
STRIDES += "num_in num_groups num_out group_size".split()  # of weights in groups
LIMIT = 240  # seconds


def kinds_of(node: Any) -> list[str]:
    """How a part of a kernel can be wrong."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
        has_mask = any(word.arg == "mask" for word in node.keywords)
        return ["address", "mask"] if has_mask else ["address"]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        return ["bound"]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        name = getattr(node.right, "id", "")
        return ["stride"] if name.isupper() or name in STRIDES else []
    return []


def change(node: Any, kind: str) -> None:
    if kind == "mask":
        node.keywords = [word for word in node.keywords if word.arg not in ("mask", "other")]
    elif kind == "bound":
        node.ops[0] = OTHER[type(node.ops[0])]()
    elif kind == "address":
        node.args[0] = ast.BinOp(node.args[0], ast.Add(), ast.Constant(1))
    else:
        node.right = ast.BinOp(node.right, ast.Add(), ast.Constant(1))


def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """Of all kernels."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    kernels = [function for function in functions if function.decorator_list]
    return [node for kernel in kernels for node in ast.walk(kernel)]


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """What is wrong, and the file with it."""
    for i, node in enumerate(nodes_of(ast.parse(source))):
        for kind in kinds_of(node):
            tree = ast.parse(source)
            change(nodes_of(tree)[i], kind)
            changed = ast.unparse(ast.fix_missing_locations(tree))
            yield f"line {node.lineno}, {kind}: {ast.unparse(node)}", changed


def is_noticed(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=LIMIT).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def main(command: list[str]) -> None:
    for file in sorted(PACKAGE.rglob("triton_*.py")):
        source = file.read_text(encoding="utf-8")
        try:
            for what, changed in mutants(source):
                file.write_text(changed, encoding="utf-8")
                if not is_noticed(command):
                    print(file.name, what, flush=True)
        finally:
            file.write_text(source, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
