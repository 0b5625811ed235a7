"""Policies: checks the names and the returned values of a user's classes. Imports no torch."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import unwrap
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

from nanovllm.block_manager import Block, BlockManager, Moves
from nanovllm.options import is_int, shown
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.topics.checks.effects import EFFECTS, Check


def check_policy(owner: Scheduler | BlockManager) -> None:
    """Checks a user's scheduler or block manager. From now on, a method that returns a wrong value,
    or leaves its work undone, raises a ScheduleError with the method and what is wrong."""
    check_names(owner)
    checks = VALUES | EFFECTS
    for name in own_methods(owner, checks):
        method = checked(owner, name, checks[name])
        setattr(owner, name, method)
    for name in own_methods(owner, KEYS):
        method = sorting(owner, name)
        setattr(owner, name, method)


def base_of(owner: object) -> type:
    return BlockManager if isinstance(owner, BlockManager) else Scheduler


def found(owner: object, name: str) -> Any:
    return vars(owner).get(name, getattr(type(owner), name, None))


def methods_of(base: type) -> set[str]:
    public = {name for name in vars(base) if not name.startswith("_")}
    return {name for name in public if callable(getattr(base, name))}


def own_methods(owner: object, names: Iterable[str]) -> list[str]:
    """Which of these methods of Scheduler or BlockManager are the user's own."""
    base = base_of(owner)
    known = [name for name in names if hasattr(base, name)]
    return [name for name in known if found(owner, name) is not getattr(base, name)]


# --- names ---


def check_names(owner: object) -> None:
    """Raises ScheduleError for a method that is a value, and the other way round, and for a method
    whose name resembles one of the base's, with as many parameters: nothing would call it, unless
    other code of the class uses the name."""
    base, cls = base_of(owner), type(owner)
    known = methods_of(base)
    for name in vars(base):
        one = found(owner, name)
        if name[0] != "_" and callable(one) != (name in known):
            kind = "a method" if name in known else "a value"
            raise ScheduleError(owner, name, f"it is {shown(one)}, and must be {kind}")
    for name in {*dir(cls)} - {*dir(base)}:
        method = getattr(cls, name)
        similar = get_close_matches(name, known, n=1, cutoff=0.85)
        if not similar or name.startswith("_") or not isinstance(method, FunctionType):
            continue
        other = getattr(base, similar[0])
        num_parameters = method.__code__.co_argcount
        is_alike = num_parameters == other.__code__.co_argcount
        if is_alike and not is_used(name, cls):
            problem = f"nothing uses it. Is it {similar[0]}? If not, call it _{name}"
            raise ScheduleError(owner, name, problem)


def is_used(name: str, cls: type) -> bool:
    """Whether another method or property has the name in its code, perhaps as a text."""
    items = chain.from_iterable(vars(each).items() for each in cls.__mro__)
    for other, one in items:
        one = getattr(one, "fget", None) or getattr(one, "func", one)
        function = unwrap(one)
        cells = getattr(function, "__closure__", None) or ()  # of a decorated one
        functions = [function, *[cell.cell_contents for cell in cells]]
        codes = [getattr(one, "__code__", None) for one in functions]
        if other != name and any(name in names_in(code) for code in codes if code):
            return True
    return False


def names_in(code: CodeType) -> set:
    names = {*code.co_names, *code.co_consts}
    inner = [names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return names.union(*inner)


# --- methods ---


def checked(owner: object, name: str, check: Check) -> Callable:
    """Returns the method, with its value and its effect checked."""
    method = getattr(owner, name)

    @wraps(method)
    def policy(*args: Any, **kwargs: Any) -> Any:
        rest = check(owner, *args, *kwargs.values())
        next(rest)
        value = method(*args, **kwargs)
        if problem := rest.send(value):
            raise ScheduleError(owner, name, problem)
        return value

    return policy


def sorting(owner: object, name: str) -> Callable:
    """Returns the method, with its sort keys checked. Each must compare with the one before."""
    method = getattr(owner, name)
    last: Any = None
    last_kinds: Any = None  # if all its values compare with any others of their kinds

    @wraps(method)
    def policy(*args: Any, **kwargs: Any) -> Any:
        nonlocal last, last_kinds
        key = method(*args, **kwargs)
        parts = key if type(key) is tuple else (key,)
        kinds = tuple(map(type, parts))
        if kinds != last_kinds:
            other = last
            last = last_kinds = None
            if not is_key(key, other):
                problem = wrong_value(key, A_KEY)
                raise ScheduleError(owner, name, problem)
            last = key
            if PLAIN.issuperset(kinds):
                last_kinds = kinds
        return key

    return policy


A_KEY = "a sort key such as (request.user_priority, request.arrival)"
PLAIN = {int, str, bool}


def is_key(key: Any, other: Any = None) -> bool:
    """Whether requests can be sorted by it. NaN differs from itself, sets have no order, and an
    array has no truth value."""
    try:
        if isinstance(key, tuple | list):
            is_ordered = all(map(is_key, key))
        else:
            is_ordered = key is not None and not isinstance(key, set | frozenset)
        if not is_ordered or key != key:
            return False
        return other is None or (key < other) in (True, False)
    except Exception:
        return False


def wrong_value(value: object, allowed: str) -> str:
    hint = ": is a `return` missing?" if value is None else ""
    return f"it returned {shown(value)}, and not {allowed}{hint}"


def returns(is_right: Callable, allowed: str) -> Check:
    """Makes the check of a returned value."""

    def check(owner, *args):
        value = yield
        yield "" if is_right(owner, value, *args) else wrong_value(value, allowed)

    return check


def is_answer(_: object, value: Any, *args: object) -> bool:
    """Accepts also those of NumPy."""
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")


def is_waiting(scheduler: Scheduler, choice: Any) -> bool:
    return choice is None or choice in scheduler.waiting


def is_budget(_: object, budget: Any) -> bool:
    is_pair = isinstance(budget, tuple) and len(budget) == 2
    return is_pair and all(is_int(num_tokens, 0) for num_tokens in budget)


def is_prefix(manager: BlockManager, blocks: Any, seq: Any) -> bool:
    """The last token is always computed."""
    if not isinstance(blocks, list):
        return False
    is_short = len(blocks) * manager.block_size < len(seq)
    return is_short and all(isinstance(block, Block) for block in blocks)


def is_taken(manager: BlockManager, block: Any) -> bool:
    if not isinstance(block, Block):
        return False
    is_own = block.ref_count == 1 and block.key is None
    return is_own and block.id not in manager.free_blocks


KEYS = "priority", "running_order"
AN_ANSWER = returns(is_answer, "True or False")
VALUES: dict[str, Check] = {
    "may_admit": AN_ANSWER,
    "should_swap": AN_ANSWER,
    "schedule": returns(lambda _, value: isinstance(value, Schedule), "a Schedule"),
    "next_waiting": returns(is_waiting, "None or one of scheduler.waiting"),
    "victim": returns(lambda _, value, candidates: value in candidates, "one of the candidates"),
    "step_budget": returns(is_budget, "two integers that are not negative"),
    "num_draft_tokens": returns(lambda _, value, *args: is_int(value, 0), "a number of tokens"),
    "reason_to_end": returns(lambda _, value, seq: isinstance(value, str | None), "a text or None"),
    # of a block manager
    "can_allocate": AN_ANSWER,
    "can_admit": AN_ANSWER,
    "find_prefix": returns(is_prefix, "a list of blocks that leaves out the sequence's last token"),
    "take_block": returns(is_taken, "a block that was free, has no key, and has a ref_count of 1"),
    "take_moves": returns(lambda _, value: isinstance(value, Moves), "Moves"),
}
