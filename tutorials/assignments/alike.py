"""Which submissions are alike: compares all files of a folder with each other and with our solutions.

    python -m tutorials.assignments.alike submissions

It compares tokens. Comments, docstrings, numbers and names of variables do not count, and nothing
that is in a starter. Two files may be alike by chance, above all if they are short: look at them.
"""

import argparse
import io
import keyword
import tokenize
from itertools import combinations
from pathlib import Path

LENGTH = 8  # of the pieces that are compared, in tokens
LEAST = 0.5  # the part of the shorter file's pieces that the other one has, too
SOLUTIONS = Path(__file__).parents[2] / "tests" / "course" / "solutions"
STARTERS = [*Path(__file__).parent.glob("*/starter.py")]
LINE_ENDS = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)


def words_of(source: str) -> list[str]:
    words: list[str] = []
    before = tokenize.NEWLINE
    for kind, text, *_ in tokenize.generate_tokens(io.StringIO(source).readline):
        if kind == tokenize.NUMBER or (kind == tokenize.STRING and before not in LINE_ENDS):
            words.append("value")
        elif kind == tokenize.OP or keyword.iskeyword(text):
            words.append(text)
        elif kind == tokenize.NAME:  # behind a dot it is a name of the engine
            words.append(text if words[-1:] == ["."] else "name")
        before = kind
    return words


def pieces_of(path: Path) -> set[tuple[str, ...]]:
    """All pieces of a file; none if it has no valid tokens."""
    try:
        words = words_of(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
        return set()
    return {tuple(words[i : i + LENGTH]) for i in range(len(words) - LENGTH + 1)}


def pairs_of(paths: list[Path]) -> list[tuple[float, Path, Path]]:
    """The pairs that have much in common, those with most first. One of a pair is a submission."""
    common = set().union(*map(pieces_of, STARTERS))
    pieces = {path: pieces_of(path) - common for path in [*paths, *SOLUTIONS.glob("*.py")]}
    found = []
    for one, other in combinations(pieces, 2):
        shorter = min(len(pieces[one]), len(pieces[other]))
        if one in paths and shorter:
            found.append((len(pieces[one] & pieces[other]) / shorter, one, other))
    return sorted((pair for pair in found if pair[0] >= LEAST), key=lambda pair: -pair[0])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with the submissions, a file each")
    folder = parser.parse_args(arguments).folder
    for share, one, other in pairs_of(sorted(folder.glob("*.py"))):
        print(f"{share:4.0%}  {one.name}  {other.name}")


if __name__ == "__main__":
    main()
