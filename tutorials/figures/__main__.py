"""Draws the pictures of the chapters.

    python -m tutorials.figures                              # all of them
    python -m tutorials.figures blocks_tables memory_waste   # some of them
    python -m tutorials.figures --list                       # their names

Writes NAME.png next to this script. Each module here that begins with plot_ says with FIGURES which
pictures it draws. Needs the extra `dev`.
"""

import argparse
from collections.abc import Callable
from importlib import import_module

from matplotlib.figure import Figure

from tutorials.figures.style import HERE, save


def figures() -> dict[str, Callable[[], Figure]]:
    """The pictures that modules of this folder draw, by their names."""
    found: dict[str, Callable[[], Figure]] = {}
    for path in sorted(HERE.glob("plot_*.py")):
        found |= import_module(f"tutorials.figures.{path.stem}").FIGURES
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = figures()
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--list", action="store_true", help="only print the names")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - known.keys())
    if unknown:
        parser.error(f"{', '.join(unknown)}: there is no such picture, but {', '.join(known)}")
    for name in args.names or known:
        if not args.list:
            save(known[name](), HERE / f"{name}.png")
        print(HERE / f"{name}.png")


if __name__ == "__main__":
    main()
