"""Classes: what a user-defined scheduler and block manager must provide besides valid schedules."""

from collections.abc import Iterable
from difflib import get_close_matches
from inspect import signature, unwrap
from types import FunctionType
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.config import Config
from nanovllm.options import shown
from nanovllm.schedule import ScheduleError
from nanovllm.scheduler import Scheduler


def check_made(scheduler: Scheduler, config: Config, runner: Any) -> None:
    """Raises ScheduleError if a constructor has not called `super()`, or if the block manager has
    blocks that the KV cache does not have."""
    manager = getattr(scheduler, "block_manager", None)
    for owner, name in ((scheduler, "running"), (manager, "blocks")):
        if not hasattr(owner, name):
            raise ScheduleError(owner, "__init__", "it did nothing: does it call super()?")
    assert manager is not None
    sizes = {
        "blocks": (len(manager.blocks), runner.num_blocks),
        "host blocks": (len(manager.host.blocks) if manager.host else 0, runner.num_host_blocks),
        "tokens per block": (manager.block_size, config.block_size),
    }
    for name, (own, given) in sizes.items():
        if own > given or (own < given and name == "tokens per block"):
            problem = f"it has {own} {name}, but the KV cache has {given}"
            raise ScheduleError(manager, "__init__", problem)


# --- methods ---


def base_of(owner: object) -> type:
    return BlockManager if isinstance(owner, BlockManager) else Scheduler


def methods_of(base: type) -> set[str]:
    return {name for name, one in vars(base).items() if name[0] != "_" and callable(one)}


def own_methods(owner: object, names: Iterable[str]) -> list[str]:
    """Which of these methods of Scheduler or BlockManager are the user's own."""
    base = base_of(owner)
    own = []
    for name in names:
        if hasattr(base, name):
            method = unwrap(getattr(owner, name))  # without checks; vars() would slow the owner
            if not str(getattr(method, "__module__", "")).startswith("nanovllm."):
                own.append(name)
    return own


def check_names(owner: object) -> None:
    """Raises ScheduleError for a method that is a value, and the other way round, for a method that
    takes other parameters than the base's, and for one whose name is almost one of the base's, with
    as many parameters: the engine would not call it."""
    base, cls = base_of(owner), type(owner)
    known = methods_of(base)
    for name in vars(base):
        one = getattr(cls, name)
        if name[0] != "_" and callable(one) != (name in known):
            kind = "a method" if name in known else "a value"
            raise ScheduleError(owner, name, f"it is {shown(one)}, and must be {kind}")
    for name in own_methods(owner, known):
        code = getattr(base, name).__code__
        parameters = code.co_varnames[: code.co_argcount]
        try:
            signature(getattr(owner, name)).bind(*parameters[1:])
        except TypeError as error:
            problem = f"it must take ({', '.join(parameters)})"
            raise ScheduleError(owner, name, problem) from error
        except ValueError:
            pass  # a builtin function may have no signature
    for name in {*dir(cls)} - {*dir(base)}:
        method = getattr(cls, name)
        similar = get_close_matches(name, known, n=1, cutoff=0.9)
        if not similar or name.startswith("_") or not isinstance(method, FunctionType):
            continue
        other = getattr(base, similar[0])
        if method.__code__.co_argcount == other.__code__.co_argcount:
            problem = f"the engine does not call it. Is it {similar[0]}? If not, call it _{name}"
            raise ScheduleError(owner, name, problem)
