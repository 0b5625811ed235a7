"""Questions that only one's own run can answer: a copied file has the answers of another run.

The student's name gives a seed, and the seed a load. A question is a function: its name is the key in
ANSWERS, its docstring says what is asked for, always an integer, and its value is what is right.
Requests that are alike are all right. The grader (`grader.py`) and the page for students (`own.py`)
share this."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from nanovllm.options import is_int
from tutorials.assignments.own_tables import RequestRow, StepRow, Tables

LONGEST_NAME = 200  # characters
FIRST_SEED = 2**40  # public seeds are below; secret ones have 128 bits
ALIKE = 1e-5  # seconds: a smaller difference is not seen in a table
Question = Callable[[Tables], set[int]]


# --- whose run it is ---


def own_seed(name: str) -> int:
    """The same on each machine."""
    return FIRST_SEED + int(hashlib.sha256(name.encode()).hexdigest()[:12], 16)


def problem_of_name(name: Any) -> str | None:
    """What is wrong with NAME, without its value; None: nothing."""
    if name is None:
        return 'your file has no NAME = "...", see "Your own run" in the handout'
    if not isinstance(name, str):
        return 'NAME must be a text, like NAME = "Ada Lovelace"'
    if not name.strip() or not name.isprintable():
        return "NAME must be one line, and not empty"
    if len(name) > LONGEST_NAME:
        return f"NAME has {len(name):,} characters, but at most {LONGEST_NAME} are allowed"
    return None


# --- what the file says of it ---


@dataclass(frozen=True)
class Own:
    """NAME and ANSWERS of a file, whatever they are."""

    name: Any = None
    answers: Any = None

    @property
    def title(self) -> str:
        return "own run" if problem_of_name(self.name) else f'own run of "{self.name}"'

    def why_no_run(self, questions: Sequence[Question]) -> str | None:
        """What is wrong, without its value; None: there is something to compare with a run."""
        if problem := problem_of_name(self.name):
            return problem
        keys = [question.__name__ for question in questions]
        if self.answers is not None and not isinstance(self.answers, dict):
            return f'ANSWERS must be a dict, like ANSWERS = {{"{keys[0]}": 7}}'
        if not {*keys} & {*(self.answers or {})}:
            return f"ANSWERS has none of the keys {', '.join(keys)}"
        return None

    def verdict(self, question: Question, tables: Tables) -> str | None:
        """What is wrong with the answer, without its value; None: it is right."""
        if question.__name__ not in self.answers:
            return "is missing"
        answer = self.answers[question.__name__]
        if not is_int(answer, -inf):
            return "is no integer"
        return None if answer in question(tables) else "is wrong"


# --- questions ---


def longest_wait(tables: Tables) -> set[int]:
    """The number of the request that waited longest for its first token."""
    return numbers(longest_waits(tables))


def overtaken_by(tables: Tables) -> set[int]:
    """How many requests came after that one, and were admitted before it."""
    found = set()
    for row in longest_waits(tables):
        later = [other for other in tables.requests if other.arrival > row.arrival]
        found.add(sum(other.admitted < row.admitted for other in later))
    return found


def there_before(tables: Tables) -> set[int]:
    """How many others had come to its replica before that one, and had not ended when it came."""
    found = set()
    for row in longest_waits(tables):
        others = [other for other in tables.requests if other.replica == row.replica]
        found.add(sum(other.arrival < row.arrival < other.last_token for other in others))
    return found


def longest_step(tables: Tables) -> set[int]:
    """The number of the step that took longest."""
    return {row.step for row in longest_steps(tables)}


def answers_then(tables: Tables) -> set[int]:
    """How many answers stood still in that step: its tokens that are not those of prompts."""
    return {row.tokens - row.prompt_tokens for row in longest_steps(tables)}


def longest_gap(tables: Tables) -> set[int]:
    """The number of the request whose answer stood still longest between two tokens."""
    return numbers(largest(tables.requests, lambda row: row.longest_gap))


def lost_most(tables: Tables) -> set[int]:
    """The number of the request that lost most: latency - baseline_latency."""
    return numbers(largest(tables.requests, lambda row: row.loss))


def most_in_vain(tables: Tables) -> set[int]:
    """The number of the request for which most tokens were computed in vain."""
    return numbers(most_computed_in_vain(tables))


def in_vain(tables: Tables) -> set[int]:
    """How many: computed_tokens - (prompt_tokens - cached_tokens + answer_tokens - 1)."""
    return {row.in_vain for row in most_computed_in_vain(tables)}


# --- what they look at ---


def largest(rows: Iterable, value: Callable[[Any], float]) -> list:
    """The rows with the largest value."""
    rows = [*rows]
    most = max(map(value, rows))
    return [row for row in rows if value(row) > most - ALIKE]


def numbers(rows: Iterable[RequestRow]) -> set[int]:
    return {row.request for row in rows}


def longest_waits(tables: Tables) -> list[RequestRow]:
    return largest(tables.requests, lambda row: row.wait)


def longest_steps(tables: Tables) -> list[StepRow]:
    return largest(tables.steps, lambda row: row.seconds)


def most_computed_in_vain(tables: Tables) -> list[RequestRow]:
    return largest(tables.requests, lambda row: row.in_vain)
