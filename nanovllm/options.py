"""Options: the base of Config, SamplingParams and BeamSearchParams. It refuses wrong values.

Imports no torch.
"""

import sys
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from math import inf
from typing import Any, ClassVar, NamedTuple, get_args


class Rule(NamedTuple):
    """Which values an option may have, and the same in words."""

    allows: Callable[[Any], object]
    words: str


class Options:
    """Base of dataclasses that take only keywords, and say which are allowed. The docstring below a
    field is also what the command line says of it."""

    RULES: ClassVar[dict[str, Rule]] = {}
    """The rules of the fields. The type of a bool or a Literal is its rule."""

    elsewhere: ClassVar[dict[str, str]] = {}
    """For names of vLLM that are no fields here: what to use instead."""

    def __new__(cls, *args, **kwargs):
        if args:
            raise ValueError(f"{cls.__name__} takes keyword arguments only, not {args[0]!r}")
        names = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in names:
                raise ValueError(f"{cls.__name__} has no field {name!r}: {cls.hint(name, names)}")
        return super().__new__(cls)

    def __post_init__(self):
        """Checks each option by its rule. None is allowed, too, where it is the default."""
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if value is None and one.default is None:
                continue
            allows, words = self.RULES.get(one.name) or rule_of_type(one.type)
            or_none = ", or None" if one.default is None else ""
            self.require(one.name, allows(value), words + or_none)

    @classmethod
    def hint(cls, name: str, names: list[str]) -> str:
        """What to write instead of a field that does not exist."""
        if name in cls.elsewhere:
            return cls.elsewhere[name]
        nearest = get_close_matches(name, names, n=1)
        if nearest:
            return f"did you mean {nearest[0]!r}?"
        return f"allowed are {', '.join(names)}"

    def put(self, name: str, value: object) -> None:
        """Replaces a field by its normalized value. Only for __post_init__: it may be frozen."""
        object.__setattr__(self, name, value)

    def require(self, name: str, condition: object, allowed: str) -> None:
        """Raises a ValueError with the field's name, its value and what is allowed."""
        if not condition:
            raise refusal(name, getattr(self, name), f"it must be {allowed}")


class PromptTooLong(ValueError):
    """A prompt has more tokens than the model or the cache can hold."""


# --- rules ---


def rule_of_type(kind: Any) -> Rule:
    if kind in (bool, "bool", bool | None):
        return Rule(lambda value: isinstance(value, bool), "True or False")
    *others, last = choices = get_args(kind)
    return Rule(lambda value: value in choices, f"{', '.join(others)} or {last}")


def integer(low: int, high: float = inf, words: str = "") -> Rule:
    def allows(value: object) -> bool:
        return is_int(value, low, high)

    return Rule(allows, words or f"an integer from {low} to {high}")


def number(low: float, high: float, words: str = "") -> Rule:
    def allows(value: object) -> bool:
        return is_number(value, low, high)

    return Rule(allows, words or f"from {low} to {high}")


def listed(allows: Callable[[Any], object], words: str, kinds: Any = list | tuple) -> Rule:
    """A list, each item of which is allowed."""

    def allows_all(values: Any) -> bool:
        return isinstance(values, kinds) and all(map(allows, values))

    return Rule(allows_all, words)


POSITIVE = integer(1, inf, "a positive integer")
ABOVE_0 = 5e-324  # the smallest number above 0
SEED = integer(0, 2**63 - 1, "an integer from 0 to 2**63 - 1")


# --- what rules and messages are made of ---


def shown(value: object, max_chars: int = 200) -> str:
    """The value as an error message shows it: on one line, and cut off if it is long."""
    try:
        text = repr(value)
    except Exception:  # Python prints no integer of more than 4,300 digits; other reprs may fail
        if isinstance(value, int):
            return f"an integer of {value.bit_length()} bits"
        return f"a {type(value).__name__}"
    is_short = len(text) <= max_chars
    return text if is_short else f"{text[:max_chars]}... ({len(text):,} characters)"


def is_int(value: Any, low: float, high: float = inf) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and low <= value <= high


def is_number(value: Any, low: float, high: float = sys.float_info.max) -> bool:
    """Whether it is a number that fits into a float. NaN fails every comparison."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and low <= value <= high


def refusal(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{name}={shown(value)} is not allowed: {allowed}")


def is_token_id(value: object) -> bool:
    return is_int(value, 0)


def is_text(value: object) -> bool:
    """Whether it is a text that is not empty, and has bytes: half a surrogate pair has none."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value != ""
