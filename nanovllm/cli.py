"""The command line: nanovllm serve, chat and complete."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.options import shown

KINDS: dict[Any, Any] = {int: int, float: float, str: str}


class Parser(argparse.ArgumentParser):
    """Names the nearest option where one does not exist."""

    def parse(self, args: Sequence[str] | None) -> argparse.Namespace:
        options, unknown = self.parse_known_args(args)
        if unknown:
            known = [name for action in self.of(options)._actions for name in action.option_strings]
            name = unknown[0].partition("=")[0]
            nearest = get_close_matches(name, known, n=1)
            hint = f": did you mean {nearest[0]}?" if nearest else ""
            self.error(f"there is no option {shown(unknown[0])}{hint}")
        return options

    def of(self, options: argparse.Namespace) -> argparse.ArgumentParser:
        """The parser of the command that was given."""
        return self.commands.choices[options.command]

    def add_commands(self) -> None:
        self.commands = self.add_subparsers(dest="command", required=True, metavar="COMMAND")
