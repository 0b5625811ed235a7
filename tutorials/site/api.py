"""The page of the public names, from their docstrings and options. Imports no torch: `LLM` is read, not imported."""

import ast
from collections.abc import Iterator
from dataclasses import MISSING, fields
from html import escape

from nanovllm import BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanovllm.config import Config
from nanovllm.topics.server.cli import meanings_of
from tutorials.site.links import ROOT

HEAD = """# API

The public names, from their docstrings. `LLM` takes the fields of `Config` as options. An unknown name or a value that is
not allowed raises a `ValueError` that says what is.
"""
CLASSES = (  # read from the source
    ("LLM", "nanovllm/engine.py", "`from nanovllm import LLM`"),
    ("RequestOutput", "nanovllm/processing/outputs.py", "what `generate`, `chat`, `step` return"),
    ("CompletionOutput", "nanovllm/processing/outputs.py", "one of its `outputs`"),
    ("Scheduler", "nanovllm/scheduler.py", "a subclass of it is `LLM(scheduler_cls=...)`"),
    (
        "BlockManager",
        "nanovllm/block_manager.py",
        "a subclass of it is `LLM(block_manager_cls=...)`",
    ),
)
MECHANISM = "    # --- a request comes ---"  # of a scheduler: what is above is made to be replaced
OPTIONS = (
    (SamplingParams, "nanovllm/sampling_params.py"),
    (Config, "nanovllm/config.py"),
    (BeamSearchParams, "nanovllm/topics/decoding/beam_search.py"),
    (StructuredOutputsParams, "nanovllm/topics/decoding/structured.py"),
)


def class_named(name: str, path: str) -> ast.ClassDef:
    tree = ast.parse((ROOT / path).read_bytes())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def signature(node: ast.FunctionDef) -> str:
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({arguments}){returns}"


def members(node: ast.ClassDef, source: list[str]) -> Iterator[str]:
    """Public methods with their docstrings, and declared fields with their comments."""
    rows = []
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_"):
            comment = source[member.end_lineno - 1].partition("  # ")[2]
            kind = cell(ast.unparse(member.annotation))
            rows.append(f"| `{ast.unparse(member.target)}` | {kind} | {comment} |\n")
    if rows:
        yield "| Field | Type | Meaning |\n|---|---|---|\n" + "".join(rows) + "\n"
    for member in node.body:
        if MECHANISM in source[node.lineno : member.lineno]:
            return
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            doc = ast.get_docstring(member)
            if doc:
                yield f"### {node.name}.{member.name}\n\n```py\n{signature(member)}\n```\n\n{doc}\n\n"


def cell(code: str) -> str:
    """Code in a table: a bar would end the cell."""
    return f"<code>{escape(code)}</code>".replace("|", "&#124;")


def option_rows(cls: type) -> Iterator[str]:
    meanings = meanings_of(cls)
    for field in fields(cls):
        default = "required" if field.default is MISSING else cell(repr(field.default))
        if field.default_factory is not MISSING:
            default = cell(repr(field.default_factory()))
        kind = getattr(field.type, "__name__", str(field.type))
        meaning = meanings[field.name].replace("|", "&#124;")
        yield f"| `{field.name}` | {cell(kind)} | {default} | {meaning} |\n"


def api_page() -> str:
    """Markdown, with links as from the root."""
    parts = [HEAD]
    for name, path, what in CLASSES:
        node = class_named(name, path)
        source = (ROOT / path).read_text(encoding="utf-8").splitlines()
        doc = ast.get_docstring(node) or ""
        parts.append(f"## {name}\n\n[`{name}`]({path}): {what}.\n\n{doc}\n\n")
        parts += members(node, source)
    for cls, path in OPTIONS:
        name = cls.__name__
        rows = "".join(option_rows(cls))
        head = "| Option | Type | Default | Meaning |\n|---|---|---|---|\n"
        parts.append(f"## {name}\n\n[`{name}`]({path})\n\n{head}{rows}\n")
    return "\n".join(parts)
