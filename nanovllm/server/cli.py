"""The command line: nanovllm serve, chat, complete and record."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from nanovllm.config import Config
from nanovllm.options import Options, shown
from nanovllm.sampling_params import SamplingParams

NOT_AN_OPTION = {"model", "n", "logprobs", "prompt_logprobs", "logit_bias", "extra_args"}
NOT_AN_OPTION |= {"structured_outputs"}


class Parser(argparse.ArgumentParser):
    """Names the nearest option where one does not exist."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args=None, namespace=None):
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            nearest = get_close_matches(name, found.option_names, n=1)
            hint = f": did you mean {nearest[0]}?" if nearest else ""
            self.error(f"there is no option {shown(name)} here{hint}")
        return found


def new_parser() -> Parser:
    parser = Parser(prog="nanovllm", description="An inference engine, small enough to read.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model by OpenAI's API, with a page at /")
    serve.add_argument("model", nargs="?", help="hub id or directory; default: the embedded one")
    serve.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--api-key", help="what clients must send")
    serve.add_argument("--served-model-name", help="default: that of the model")
    serve.add_argument("--max-waiting", type=int, help="requests that may wait; others get a 429")
    serve.add_argument("--max-body-bytes", type=int, help="the longest body of a request")
    serve.add_argument("--max-tokens-per-call", type=int, help="prompts * n * max_tokens")
    serve.add_argument("--drain-seconds", type=float, help="for running requests, at the end")
    serve.add_argument("--allowed-origins", nargs="*", help="of pages of others (CORS)")
    serve.add_argument("--replicas", type=int, help="so many engines, by Ray Serve")
    serve.add_argument("--max-replicas", type=int, help="more of them under load, up to so many")
    serve.add_argument("--target-requests", type=float, help="of a replica: with more it is loaded")
    serve.add_argument("--router-cls", type=imported, help="who serves a request: module:Class")
    serve.add_argument("--cpus-per-rank", type=float, help="what Ray reserves")

    chat = commands.add_parser("chat", help="talk to a model, or to a server")
    chat.add_argument("model", nargs="?", help="hub id or directory; default: the embedded one")
    chat.add_argument("--url", help="of a server, for example http://localhost:8000")
    chat.add_argument("--api-key", help="that of the server")

    complete = commands.add_parser("complete", help="continue a text")
    complete.add_argument("text")
    complete.add_argument("--model", help="hub id or directory; default: the embedded one")

    record = commands.add_parser("record", help="write a run for the page, as JSON")
    record.add_argument("file")
    record.add_argument("prompts", nargs="+", help="texts that the model continues together")
    record.add_argument("--model", help="hub id or directory; default: the embedded one")

    for command in commands.choices.values():
        if command is not serve:
            add_options(command, SamplingParams)
        add_options(command, Config)
        names = [name for action in command._actions for name in action.option_strings]
        command.set_defaults(option_names=names)
    return parser


def add_options(parser: argparse.ArgumentParser, kind: type[Options]) -> None:
    """One for each field. Those that are not given keep the field's default."""
    group = parser.add_argument_group(kind.__name__)
    for field in fields(kind):  # type: ignore[arg-type]
        option = "--" + field.name.replace("_", "-")
        if field.name in NOT_AN_OPTION or option in parser._option_string_actions:
            continue
        text = field.metadata["meaning"].replace("%", "%%")
        if field.type in (bool, "bool"):
            group.add_argument(option, action=argparse.BooleanOptionalAction, help=text)
        elif field.name == "stop":
            group.add_argument(option, nargs="+", help=text)
        elif field.name == "stop_token_ids":
            group.add_argument(option, nargs="+", type=int, help=text)
        else:
            group.add_argument(option, type=reader_of(field.type), help=text)


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


def main(args: Sequence[str] | None = None) -> None:
    parser = new_parser()
    options = parser.parse_args(args)
    from nanovllm.server import commands  # torch takes seconds: not for --help

    try:
        getattr(commands, options.command)(options)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever reads has enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, ImportError) as error:
        parser.exit(2, f"nanovllm: {error}\n")
