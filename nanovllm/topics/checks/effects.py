"""Effects: checks what the methods of a user's classes have done. Imports no torch."""

from bisect import insort
from collections.abc import Callable, Generator, Iterable
from itertools import chain
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.options import is_int, shown
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request, Sequence
from nanovllm.topics.checks.classes import own_methods

# begins before the method, with its arguments; gets the method's value, and yields what is wrong
Rest = Generator[str, Any, None]
Check = Callable[..., Rest]


def wrong_value(value: object, allowed: str) -> str:
    hint = ": is a `return` missing?" if value is None else ""
    return f"it returned {shown(value)}, and not {allowed}{hint}"


# --- sort keys ---

KEYS = {"priority": "waiting", "running_order": "running"}  # a method, and the queue that it sorts
A_KEY = "a sort key such as (request.user_priority, request.arrival)"


def check_keys(scheduler: Scheduler, name: str, requests: Iterable[Request]) -> None:
    """Raises ScheduleError for a key of these requests that cannot be sorted with the others."""
    own = own_methods(scheduler, [name, "priority"])  # running_order returns priority
    in_order: list = []
    for request in requests if own else ():
        key = getattr(scheduler, name)(request)
        try:
            is_right = is_key(key)
            insort(in_order, key)
        except Exception:
            is_right = False
        if not is_right:
            raise ScheduleError(scheduler, own[0], wrong_value(key, A_KEY))


def is_key(key: Any) -> bool:
    """NaN differs from itself, sets have no order, and an array raises: it has no truth value."""
    if isinstance(key, tuple | list):
        return all(map(is_key, key))
    return not isinstance(key, set | frozenset) and bool(key == key)


# --- blocks and queues ---


def gives_back(manager: BlockManager, seqs: Iterable[Sequence]) -> Callable[[], str]:
    """Says later whether the blocks of the sequences have lost these owners."""
    tables = [seq.block_table for seq in seqs]
    ids = {*chain(*tables)}
    blocks = [manager.blocks[block_id] for block_id in ids]
    most = sum(block.ref_count for block in blocks) - sum(map(len, tables))

    def problem() -> str:
        if sum(block.ref_count for block in blocks) <= most:
            return ""
        return f"the blocks {shown(sorted(ids))} are not free: does it call super()?"

    return problem


def free(manager: BlockManager, seq: Sequence) -> Rest:
    problem = gives_back(manager, [seq])
    yield ""
    yield problem()


def fork(manager: BlockManager, parent: Sequence, child: Sequence, *_: Any) -> Rest:
    yield ""
    shared = set(parent.block_table).intersection(child.block_table)
    is_counted = all(manager.blocks[block_id].ref_count > 1 for block_id in shared)
    is_part = is_counted and child.num_computed_tokens <= parent.num_computed_tokens
    yield "" if is_part else f"{child} has more than {parent}, or a wrong ref_count"


def allocate(manager: BlockManager, seq: Sequence, num_tokens: int) -> Rest:
    yield ""
    lacks = seq.num_computed_tokens + num_tokens > len(seq.block_table) * manager.block_size
    yield f"{seq} lacks blocks for {num_tokens} tokens: does it call super()?" if lacks else ""


def set_max_len(scheduler: Scheduler, request: Request) -> Rest:
    yield ""
    low, high = len(request.prompt_token_ids) + 1, scheduler.max_model_len
    allowed = f"it must be an integer from {low} to {high}"
    is_right = is_int(request.max_len, low, high)
    yield "" if is_right else f"max_len is {shown(request.max_len)}: {allowed}"


def enqueue(scheduler: Scheduler, request: Request) -> Rest:
    if scheduler.keeps_order:  # then the queue is sorted now
        check_keys(scheduler, "priority", [*scheduler.waiting[-1:], request])
    yield ""
    times = scheduler.waiting.count(request)
    yield f"{request} is in waiting {times} times" if times > 1 else ""


def admit(scheduler: Scheduler, request: Request) -> Rest:
    """Only for the loop of `schedule_waiting`, which would never end: any other may go on."""
    yield ""
    is_in_loop = type(scheduler).schedule_waiting is Scheduler.schedule_waiting
    has_moved = request in scheduler.running and request not in scheduler.waiting
    is_wrong = is_in_loop and not has_moved
    yield f"{request} is not running, or still waiting: does it call super()?" if is_wrong else ""


def tokens_to_compute(scheduler: Scheduler, request: Request, schedule: Schedule) -> Rest:
    items = yield ""
    yield "" if isinstance(items, list | tuple) else wrong_value(items, "a list of items")


def preempt(scheduler: Scheduler, request: Request) -> Rest:
    problem = gives_back(scheduler.block_manager, request.sequences)
    yield ""
    yield "" if request in scheduler.running else problem()


def finish(scheduler: Scheduler, seq: Sequence, *_: Any) -> Rest:
    problem = gives_back(scheduler.block_manager, [seq])
    yield ""
    request = seq.request
    if seq.finish_reason is None:
        end = f"{seq} has reached its end, {request.max_len} tokens, and goes on"
        yield f"{end}: does it call super()?" if len(seq) >= request.max_len else ""
    is_left = request.has_ended and request in scheduler.running + scheduler.waiting
    yield f"{request} has ended, but is still queued" if is_left else problem()


OF_REQUESTS = set_max_len, enqueue, admit, tokens_to_compute, preempt, finish
EFFECTS: dict[str, Check] = {one.__name__: one for one in (free, fork, allocate, *OF_REQUESTS)}
