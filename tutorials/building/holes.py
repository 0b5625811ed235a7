"""Holes: functions of the engine without their bodies, made from the source as it is now."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: str) -> dict[str, Function]:
    """The functions and methods of a module, by names such as "Scheduler.preempt"."""
    found: dict[str, Function] = {}
    for node in ast.parse(source).body:
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for one in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(one, Function):
                found[prefix + one.name] = one
    return found


def source_of(source: str, name: str) -> str:
    """The lines of a function; nothing if it is not there."""
    function = functions(source).get(name)
    lines = source.splitlines(keepends=True)
    return "".join(lines[function.lineno - 1 : function.end_lineno]) if function else ""


def replaced(text: str, old: str, new: str) -> str | None:
    r"""The text with `new` in place of `old`; None if `old` is not there. A line break in them is
    written as \n, without the indentation. Raises ValueError if `old` is there more than once."""
    start = re.search(
        rf"^( *)(.*?){re.escape(old.partition(chr(92) + 'n')[0])}", text, re.MULTILINE
    )
    indented = [part.replace(r"\n", f"\n{start[1]}") for part in (old, new) if start]
    if not start or indented[0] not in text:
        return None
    if text.count(indented[0]) > 1:
        raise ValueError(f"{old!r} is there more than once")
    return text.replace(*indented)


def statements(function: Function) -> list[ast.stmt]:
    """The body without the docstring."""
    has_docstring = ast.get_docstring(function) is not None
    return function.body[has_docstring:]


def with_holes(source: str, names: Iterable[str], message: str) -> str:
    """The source with a `raise` in place of these bodies. Signatures, types and docstrings stay."""
    lines = source.splitlines(keepends=True)
    known = functions(source)
    for function in sorted((known[name] for name in names), key=lambda one: -one.lineno):
        first = statements(function)[0]
        decorators = getattr(first, "decorator_list", [])
        begin = min(node.lineno for node in [first, *decorators]) - 1
        while lines[begin - 1].lstrip().startswith("#"):
            begin -= 1  # a comment would say how it is done
        lines[begin : function.end_lineno] = [
            f'{" " * first.col_offset}raise NotImplementedError("{message}")\n'
        ]
    return "".join(lines)


def filled(path: Path, names: Iterable[str], ours: Path) -> str:
    """The source of a file with these functions as they are in ours."""
    sources = [one.read_text(encoding="utf-8") for one in (path, ours)]
    lines, right = (source.splitlines(keepends=True) for source in sources)
    known, others = map(functions, sources)
    for name in sorted(names, key=lambda name: -known[name].lineno):
        body = right[others[name].lineno - 1 : others[name].end_lineno]
        lines[known[name].lineno - 1 : known[name].end_lineno] = body
    return "".join(lines)


def is_open(function: Function) -> bool:
    text = ast.unparse(statements(function)[0]) if statements(function) else ""
    return re.match(r"raise NotImplementedError\('milestone \d", text) is not None


def open_holes(source: str) -> list[str]:
    """The functions that still have no body."""
    return [name for name, function in functions(source).items() if is_open(function)]


def function_at(source: str, line: int) -> str:
    """The name of the function around this line, or an empty string."""
    for name, function in functions(source).items():
        if function.lineno <= line <= (function.end_lineno or 0):
            return name
    return ""
