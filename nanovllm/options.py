"""Options: the base of Config, SamplingParams and BeamSearchParams. It refuses wrong values.

Imports no torch.
"""

import sys
from dataclasses import field, fields
from difflib import get_close_matches
from math import inf
from typing import Any, ClassVar


class Options:
    """Base of dataclasses that take only keywords, and say which are allowed."""

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

    @classmethod
    def hint(cls, name: str, names: list[str]) -> str:
        """What to write instead of a field that does not exist."""
        if name in cls.elsewhere:
            return cls.elsewhere[name]
        allowed = f"allowed are {', '.join(names)}"
        nearest = get_close_matches(name, names, n=1)
        return f"did you mean {nearest[0]!r}? ({allowed})" if nearest else allowed

    def put(self, name: str, value: object) -> None:
        """Replaces a field by its normalized value. Only for __post_init__: it may be frozen."""
        object.__setattr__(self, name, value)

    def require(self, name: str, condition: object, allowed: str) -> None:
        """Raises a ValueError with the field's name, its value and what is allowed."""
        if not condition:
            raise refusal(name, getattr(self, name), f"it must be {allowed}")


class PromptTooLong(ValueError):
    """A prompt has more tokens than the model or the cache can hold."""


def option(default: Any, meaning: str) -> Any:
    """A field of Options. Its meaning is also what the command line says of it."""
    return field(default=default, metadata={"meaning": meaning})


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


def is_int(value: object, low: float, high: float = inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object, low: float, high: float = sys.float_info.max) -> bool:
    """Whether it is a number that fits into a float. NaN fails every comparison."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def refusal(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{name}={shown(value)} is not allowed: {allowed}")
