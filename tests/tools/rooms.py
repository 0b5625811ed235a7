"""Which rooms of tests run: without a path those of the engine, with --all those of the book, too."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOOK = [ROOT / "tests" / name for name in ("course", "simulator", "tutorials")]


def choose(config: pytest.Config) -> None:
    if config.args_source != config.ArgsSource.TESTPATHS:
        config.option.all = True  # what is named is run
    elif config.option.all:
        # the public tests with the starters; first, because they are long
        config.args.insert(0, "tutorials/assignments")


def is_left_out(path: Path, config: pytest.Config) -> bool:
    return path in BOOK and not config.option.all
