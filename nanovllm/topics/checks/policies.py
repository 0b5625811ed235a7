"""Policies: checks the returned values of a user's classes. Imports no torch."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from nanovllm.block_manager import Block, BlockManager, Moves
from nanovllm.options import is_int
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.topics.checks.classes import check_names, own_methods
from nanovllm.topics.checks.effects import EFFECTS, KEYS, Check, wrong_value


def check_policy(owner: Scheduler | BlockManager) -> None:
    """Checks a user's scheduler or block manager. From now on, a method that returns a wrong value,
    or leaves its work undone, raises a ScheduleError with the method and what is wrong."""
    check_names(owner)
    checks = VALUES | EFFECTS
    names = own_methods(owner, checks)
    if own_methods(owner, KEYS):
        names.append("enqueue")  # it may compare keys
    for name in names:
        method = checked(owner, name, checks[name])
        setattr(owner, name, method)


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


def returns(is_right: Callable, allowed: str) -> Check:
    """Makes the check of a returned value."""

    def check(owner, *args):
        value = yield
        yield "" if is_right(owner, value, *args) else wrong_value(value, allowed)

    return check


def is_answer(_: object, value: Any, *args: object) -> bool:
    """Accepts also those of NumPy."""
    return type(value).__name__ in ("bool", "bool_")


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
    is_one = isinstance(block, Block) and block.id not in manager.free_blocks
    return is_one and block.ref_count == 1 and block.key is None


AN_ANSWER = returns(is_answer, "True or False")
A_COUNT = returns(lambda _, value, *args: is_int(value, 0), "a number that is not negative")
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
    "num_blocks_for": A_COUNT,
    "max_blocks_needed": A_COUNT,
    "longest_that_fits": A_COUNT,
    "num_new_blocks": A_COUNT,
    "num_blocks_at_fork": A_COUNT,
    "find_prefix": returns(is_prefix, "a list of blocks that leaves out the sequence's last token"),
    "take_block": returns(is_taken, "a block that was free, has no key, and has a ref_count of 1"),
    "take_moves": returns(lambda _, value: isinstance(value, Moves), "Moves"),
}
