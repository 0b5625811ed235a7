"""The command line of an experiment, and types of its arguments: each says what is allowed, before
anything runs."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def checked(
    parse: Callable[[str], Any], is_allowed: Callable[[Any], bool], allowed: str
) -> Callable[[str], Any]:
    """A type of the allowed values. `allowed` describes them in error messages."""

    def convert(text: str):
        with suppress(ValueError):
            value = parse(text)
            if is_allowed(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: it must be {allowed}")

    return convert


positive = checked(int, lambda n: n > 0, "a positive integer")
# of a result that may take minutes to be measured
new_file = checked(
    Path, lambda path: path.absolute().parent.is_dir(), "a file in a folder that exists"
)


def experiment(
    doc: str | None, json: str = "write the results to this file"
) -> argparse.ArgumentParser:
    """A parser that shows the docstring of a module, with `--json FILE`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help=json)
    return parser
