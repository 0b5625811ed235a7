"""The command line: nanovllm serve, chat, complete and record."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import Field, fields
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from nanovllm.config import Config
from nanovllm.options import Options, refusal, shown
from nanovllm.sampling_params import SamplingParams

NOT_AN_OPTION = {"model", "n", "logprobs", "prompt_logprobs", "logit_bias", "extra_args"}
NOT_AN_OPTION |= {"structured_outputs"}


class Parser(argparse.ArgumentParser):
    """Names the nearest option where one does not exist, and keeps its errors to one line."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)
        self.names: list[str] = []

    def add(self, group: Any, *names: str, **how) -> None:
        self.names += names
        group.add_argument(*names, **how)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help says more)\n")

    def parse_args(self, args=None, namespace=None):
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            nearest = get_close_matches(name, found.option_names, n=1, cutoff=0.75)
            hint = f": did you mean {nearest[0]}?" if nearest else ""
            self.error(f"there is no option {shown(name)} here{hint}")
        return found


SERVE: dict[
    str, dict[str, Any]
] = {  # of `nanovllm serve` only: option, what it means, how it is read
    "--host": dict(default="127.0.0.1", help="0.0.0.0 lets other machines in (default: 127.0.0.1)"),
    "--port": dict(type=int, default=8000, help="0 is any free one (default: 8000)"),
    "--api-key": dict(
        action="append",
        help="what clients must send; may be given several times, and in"
        " NANOVLLM_API_KEY, where `ps` does not show it (default: none)",
    ),
    "--served-model-name": dict(nargs="+", help="names for clients (default: that of the model)"),
    "--chat-template": dict(help="a file in Jinja, instead of the model's own template"),
    "--config": dict(help="a JSON file with options, by their names; those given here go first"),
    "--max-waiting": dict(type=int, help="others get a 429 (default: 256 requests)"),
    "--max-body-bytes": dict(
        type=int, help="of a request (default: 32 times max_model_len, from 256 KiB to 4 MiB)"
    ),
    "--max-tokens-per-call": dict(type=int, help="prompts * n * max_tokens (default: 1,048,576)"),
    "--drain-seconds": dict(type=float, help="for running requests, at the end (default: 30)"),
    "--allowed-origins": dict(nargs="*", help="of pages of others (CORS)"),
    "--allow-priority": dict(
        action=argparse.BooleanOptionalAction, help="let clients say who goes first (default: no)"
    ),
    "--log-requests": dict(
        action=argparse.BooleanOptionalAction, help="a line for each request (default: yes)"
    ),
    "--show": dict(
        action="store_true",
        help="for the page: a small cache, unless other options are given, and 10 steps a second",
    ),
    "--replicas": dict(type=int, help="so many engines, by Ray Serve (default: one, without Ray)"),
    "--max-replicas": dict(type=int, help="more of them under load, up to so many"),
    "--target-requests": dict(
        type=float, help="of a replica: with more it is loaded (default: 32)"
    ),
    "--router-cls": dict(help="which replica serves a request (default: PrefixAffinity)"),
    "--cpus-per-rank": dict(type=float, help="what Ray reserves (default: 0.5)"),
}


def new_parser() -> Parser:
    parser = Parser(prog="nanovllm", description="An inference engine, small enough to read.")
    parser.add_argument("--version", action="version", version=f"nanovllm {version('nanovllm')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model by OpenAI's API, with a page at /")
    for name, how in SERVE.items():
        serve.add(serve, name, **({"type": imported} if name == "--router-cls" else {}), **how)

    chat = commands.add_parser("chat", help="talk to a model, or to a server")
    chat.add(chat, "--url", help="of a server, for example http://localhost:8000")
    chat.add(chat, "--api-key", help="that of the server (default: NANOVLLM_API_KEY)")

    complete = commands.add_parser("complete", help="continue a text")
    complete.add_argument("text", help="- reads it from standard input")

    record = commands.add_parser("record", help="write a run for the page, as JSON")
    record.add_argument("file")
    record.add_argument("prompts", nargs="+", help="texts that the model continues together")

    for command in (serve, chat, complete, record):
        model = "hub id or directory (default: the embedded one)"
        if command in (serve, chat):
            command.add_argument("positional", nargs="?", metavar="MODEL", help=model)
        command.add(command, "--model", help=model)
        if command is not serve:
            add_options(command, SamplingParams)
        add_options(command, Config)
        command.set_defaults(option_names=command.names)
    return parser


def add_options(parser: Parser, kind: type[Options]) -> None:
    """One for each field. Those that are not given keep the field's default."""
    group = parser.add_argument_group(kind.__name__)
    for field in fields(kind):  # type: ignore[arg-type]
        option = "--" + field.name.replace("_", "-")
        if field.name in NOT_AN_OPTION or option in parser.names:
            continue
        text = help_of(field)
        if field.type in (bool, "bool"):
            parser.add(group, option, action=argparse.BooleanOptionalAction, help=text)
        elif field.name == "stop":
            parser.add(group, option, nargs="+", help=text)
        elif field.name == "stop_token_ids":
            parser.add(group, option, nargs="+", type=int, help=text)
        else:
            parser.add(group, option, type=reader_of(field.type), help=text)


def help_of(field: Field) -> str:
    """What the option means, and its default, if the text does not say it."""
    value = field.default
    text = field.metadata["meaning"].replace("%", "%%")
    if value is None:
        return text
    return f"{text} (default: {getattr(value, '__name__', value)})"


def reader_of(kind: Any) -> Any:
    """What turns the option's text into a value of this type."""
    if get_origin(kind) is Literal:
        return str
    kinds = [one for one in get_args(kind) or (kind,) if one is not NoneType]
    return imported if kinds[0] is type else kinds[0]


def imported(name: str) -> type:
    """The class that `module:Class` names."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{name} is not module:Class: {error}") from error


def words_of(options: dict[str, Any]) -> list[str]:
    """Options by their names, as the command line has them."""
    words: list[str] = []
    for name, value in options.items():
        option = "--" + str(name).replace("_", "-")
        if str(value).lower() in ("true", "false"):
            words.append(option if str(value).lower() == "true" else "--no" + option[1:])
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        elif value is not None:
            words.append(f"{option}={value}")
    return words


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line, and the file of options that it names."""
    parser = new_parser()
    args = parser.parse_args(words)
    if getattr(args, "config", None) is not None:
        command, *others = sys.argv[1:] if words is None else words
        args = parser.parse_args([command, *words_of(read_options(args.config)), *others])
    positional = getattr(args, "positional", None)
    if positional is not None:
        args.model = positional
    return args


def read_options(file: str) -> dict[str, Any]:
    """Raises ValueError."""
    import yaml

    try:
        options = yaml.safe_load(Path(file).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise refusal("config", file, shown(str(error))) from error
    if not isinstance(options, dict):
        raise refusal("config", file, "it must have a line for each option, as `port: 8000`")
    return options


def main(words: Sequence[str] | None = None) -> None:
    try:
        args = parsed(words)
        from nanovllm.server import commands  # torch takes seconds: not for --help

        getattr(commands, args.command)(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader has enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, ImportError) as error:
        sys.stderr.write(f"nanovllm: {error}\n")
        sys.exit(2)
