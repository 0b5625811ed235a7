"""Effects: checks what the methods of a user's classes have done. Imports no torch."""

from collections.abc import Callable, Generator, Iterable
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.options import is_int, shown
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request, Sequence

# begins before the method, with its arguments; gets the method's value, and yields what is wrong
Rest = Generator[str, Any, None]
Check = Callable[..., Rest]


def gives_back(manager: BlockManager, seqs: Iterable[Sequence]) -> Callable[[], str]:
    """Says later whether the blocks of the sequences have lost these owners."""
    tables = [seq.block_table for seq in seqs]
    ids = {block_id for table in tables for block_id in table}
    blocks = [manager.blocks[block_id] for block_id in ids]
    most = sum(block.ref_count for block in blocks) - sum(map(len, tables))

    def problem() -> str:
        is_held = any(seq.block_table for seq in seqs)
        if not is_held and sum(block.ref_count for block in blocks) <= most:
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
    is_queued = request in scheduler.running or request in scheduler.waiting
    is_left = request.has_ended and is_queued
    yield f"{request} has ended, but is still queued" if is_left else problem()


EFFECTS: dict[str, Check] = {
    check.__name__: check
    for check in (free, fork, allocate, set_max_len, enqueue, admit, preempt, finish)
}
