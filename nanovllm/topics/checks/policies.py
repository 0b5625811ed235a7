"""Policies: checks what the methods of a user's scheduler return. Imports no torch."""

from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any

from nanovllm.options import is_int, shown
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.scheduler import Scheduler

Rule = tuple[Callable[..., bool], str]  # of a scheduler, the returned value and the arguments


def check_policy(scheduler: Scheduler) -> None:
    """Checks a user's policy. From now on, a method that returns a wrong value raises a
    ScheduleError with the method, the value and what is allowed. Raises ScheduleError for a method
    whose name resembles one of Scheduler's: nothing would call it."""
    known = [name for name in dir(Scheduler) if not name.startswith("_")]
    for name in {*dir(type(scheduler))} - {*dir(Scheduler)}:
        similar = get_close_matches(name, known, n=1, cutoff=0.85)
        if similar and not name.startswith("_"):
            problem = f"nothing uses it. Is it {similar[0]}? If not, call it _{name}"
            raise ScheduleError(scheduler, name, problem)
    for name, rule in RULES.items():
        if getattr(type(scheduler), name) is not getattr(Scheduler, name):
            setattr(scheduler, name, checked(scheduler, name, rule))


def checked(scheduler: Scheduler, name: str, rule: Rule) -> Callable:
    method = getattr(scheduler, name)
    is_right, allowed = rule
    first: list[Any] = []  # of sort keys, all others must compare with the first one

    @wraps(method)
    def policy(*args: Any) -> Any:
        value = method(*args)
        first[:] = first or [value]
        is_mixed = rule is A_KEY and not can_compare(value, first[0])
        if is_mixed or not is_right(scheduler, value, *args):
            hint = ": is a `return` missing?" if value is None else ""
            problem = f"it returned {shown(value)}, and not {allowed}{hint}"
            raise ScheduleError(scheduler, name, problem)
        return value

    return policy


def is_key(scheduler: Scheduler, key: Any, _: object) -> bool:
    """Whether the waiting requests can be sorted by it. NaN differs from itself."""
    if isinstance(key, tuple):
        return all(is_key(scheduler, part, _) for part in key)
    return key is not None and key == key


def can_compare(key: Any, other: Any) -> bool:
    try:
        return (key < other) in (True, False)
    except TypeError:
        return False


def is_waiting(scheduler: Scheduler, choice: Any) -> bool:
    return choice is None or choice in scheduler.waiting


def is_budget(scheduler: Scheduler, budget: Any) -> bool:
    is_pair = isinstance(budget, tuple) and len(budget) == 2
    return is_pair and all(is_int(num_tokens, 0) for num_tokens in budget)


A_KEY: Rule = is_key, "a sort key such as (request.user_priority, request.arrival)"
AN_ANSWER: Rule = (
    lambda _, value, *args: value is not None,
    "True or False",
)
RULES: dict[str, Rule] = {
    "priority": A_KEY,
    "running_order": A_KEY,
    "may_admit": AN_ANSWER,
    "should_swap": AN_ANSWER,
    "schedule": (lambda _, value: isinstance(value, Schedule), "a Schedule"),
    "next_waiting": (is_waiting, "None or one of scheduler.waiting"),
    "victim": (lambda _, value, candidates: value in candidates, "one of the candidates"),
    "step_budget": (is_budget, "two integers that are not negative"),
    "num_draft_tokens": (lambda _, value, request: is_int(value, 0), "a number of tokens"),
    "reason_to_end": (lambda _, value, seq: isinstance(value, str | None), "a text or None"),
}
