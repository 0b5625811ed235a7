"""The command line: nanovllm serve, chat and first-light."""

import argparse
import ast
import inspect
import io
import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from importlib.metadata import version
from itertools import pairwise
from pkgutil import resolve_name
from textwrap import dedent
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from nanovllm.config import Config
from nanovllm.options import Options, shown
from nanovllm.sampling_params import SamplingParams
from nanovllm.topics.first_light import command as first_light
from nanovllm.topics.server.settings import ReplicaOptions, ServerOptions

NOT_AN_OPTION = "model n logprobs prompt_logprobs logit_bias extra_args structured_outputs".split()
SHORT = {"--tensor-parallel-size": ["-tp"]}


class Parser(argparse.ArgumentParser):
    """Raises a ValueError that says what is wrong, and names the most similar option."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} ({self.prog} --help says more)")

    def parse_known_args(self, args=None, namespace=None):
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            nearest = get_close_matches(name, self._option_string_actions, n=1, cutoff=0.75)
            hint = f": did you mean {nearest[0]}?" if nearest else ""
            self.error(f"there is no option {shown(name)} here{hint}")
        return found, unknown


def new_parser() -> Parser:
    about = "An inference engine, small enough to read. @FILE stands for the words in its lines."
    parser = Parser(prog="nanovllm", description=about, fromfile_prefix_chars="@")
    parser.add_argument("--version", action="version", version=f"nanovllm {version('nanovllm')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model by OpenAI's API, with a page at /")
    local = "127.0.0.1"
    serve.add_argument("--host", default=local, help=f"default: {local}; 0.0.0.0: any machine")
    serve.add_argument("--port", type=int, default=8000, help="0 is any free one (default: 8000)")
    show = "for the page: a small cache, unless other options are given, and 10 steps a second"
    serve.add_argument("--show", action="store_true", help=show)
    add_options(serve, ServerOptions)
    add_options(serve, ReplicaOptions)

    chat = commands.add_parser("chat", help="talk to a model")

    first_light.add_command(commands)
    for command in (serve, chat):
        model = "hub id or directory (default: the embedded one)"
        command.add_argument(
            "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=model
        )
        command.add_argument("--model", help=model)
        if command is not serve:
            add_options(command, SamplingParams)
        add_options(command, Config)
    return parser


def add_options(parser: Parser, kind: type[Options]) -> None:
    """Adds one option for each field. A field without its option keeps its default."""
    group = parser.add_argument_group(kind.__name__)
    meanings = meanings_of(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        option = "--" + field.name.replace("_", "-")
        if field.name not in NOT_AN_OPTION and option not in parser._option_string_actions:
            text = help_of(field, meanings[field.name])
            form = how_to_read(field.type)
            group.add_argument(*SHORT.get(option, []), option, help=text, **form)


def meanings_of(kind: type[Options]) -> dict[str, str]:
    """The docstrings below the fields of a class."""
    (class_node,) = ast.parse(dedent(inspect.getsource(kind))).body
    meanings = {}
    for node, below in pairwise(class_node.body):  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
            meanings[ast.unparse(node.target)] = " ".join(ast.literal_eval(below.value).split())
    return meanings


def help_of(field: Field, meaning: str) -> str:
    """The meaning of the option, and its default if the text does not name it."""
    value = field.default
    text = meaning.replace("%", "%%")
    if value is None or value is MISSING:
        return text
    return f"{text} (default: {getattr(value, '__name__', value)})"


def how_to_read(kind: Any) -> dict[str, Any]:
    """The function that turns the option's text into a value of this type."""
    if kind in (bool, bool | None):
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"metavar": f"{{{','.join(get_args(kind))}}}"}
    lists = [
        one for one in (kind, *get_args(kind)) if get_origin(one) in (list, Sequence, Collection)
    ]
    if lists:  # one value each time: several would take the MODEL behind them
        return {"action": "append", "type": get_args(lists[0])[0]}
    kinds = [one for one in get_args(kind) or (kind,) if one is not NoneType]
    return {"type": {type: imported, dict: json.loads}.get(kinds[0], kinds[0])}


def imported(name: str) -> type:
    """The class of `module:Class`."""
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{name} is not module:Class: {error}") from error


def main(words: Sequence[str] | None = None) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console may lack a letter
    if sys.stdin is None:  # it is closed
        sys.stdin = io.StringIO()
    try:
        args = new_parser().parse_args(words)
        if args.command == "first-light":  # it needs no torch here
            return first_light.run(args)
        from nanovllm.topics.server import commands  # torch takes seconds: not for --help

        getattr(commands, args.command)(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader has enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, ImportError, OSError) as error:
        sys.stderr.write(f"nanovllm: {error}\n")
        sys.exit(2)
