"""Options: the base of Config, SamplingParams and BeamSearchParams; it refuses wrong values. Imports no torch."""

import sys
from dataclasses import fields
from difflib import get_close_matches
from math import inf


class Options:
    """Base of dataclasses in which an unknown keyword raises an error that suggests the nearest field."""

    def __new__(cls, *args, **kwargs):
        if args:
            raise ValueError(f"{cls.__name__} takes keyword arguments only, not {args[0]!r}")
        names = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in names:
                nearest = get_close_matches(name, names, n=1, cutoff=0.5)
                hint = (
                    f"did you mean {nearest[0]!r}?"
                    if nearest
                    else f"allowed are {', '.join(names)}"
                )
                raise ValueError(f"{cls.__name__} has no field {name!r}: {hint}")
        return super().__new__(cls)

    def require(self, name: str, condition: object, allowed: str) -> None:
        """Raises a ValueError with the field's name, its value and what is allowed."""
        if not condition:
            raise ValueError(
                f"{name}={shown(getattr(self, name))} is not allowed: it must be {allowed}"
            )


def shown(value: object, most_chars: int = 200) -> str:
    """The value as an error message shows it: on one line, and cut off if it is long."""
    try:
        text = repr(value)
    except (
        Exception
    ):  # Python refuses to print integers of more than 4,300 digits, and other reprs may fail, too
        return (
            f"an integer of {value.bit_length()} bits"
            if isinstance(value, int)
            else f"a {type(value).__name__}"
        )
    return text if len(text) <= most_chars else f"{text[:most_chars]}... ({len(text):,} characters)"


def is_int(value: object, low: float, high: float = inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object, low: float, high: float = sys.float_info.max) -> bool:
    """Whether it is a number that fits into a float. NaN fails every comparison."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
