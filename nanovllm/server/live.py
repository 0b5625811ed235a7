"""The live view: pictures of the engine after its steps, for the page to draw.

Nothing of this is in the engine's way: it is an observer, and it is there only while a page
watches. A picture costs its thread a millisecond at most, however large the cache is: it tells
what has changed, and of that at most so much. The next ones tell the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from nanovllm.block_manager import BlockManager
from nanovllm.schedule import Schedule
from nanovllm.sequence import Request, Sequence

if TYPE_CHECKING:  # the lab has a scheduler, but no engine
    from nanovllm.engine import LLM

# in one frame at most
MOST_TOLD = 4096  # blocks of tables, and as many moves of each kind
MOST_LOOKED_AT = 2048  # blocks that may be free, but findable
MOST_WAITING = 500  # requests
MOST_ROWS = 20  # requests in each state whose tokens are told

Tables = dict[Sequence, list[int]]


class Told:
    """What a reader knows of block tables."""

    def __init__(self) -> None:
        self.tables: Tables = {}

    def news(self, tables: Tables) -> list[list]:
        """Tells of each table that has changed: request, sequence, how many of its blocks stay as
        they were, and those that follow."""
        news = []
        for seq in [seq for seq in self.tables if seq not in tables]:
            del self.tables[seq]
            news.append([seq.request.request_id, seq.index, 0, []])
        room = MOST_TOLD
        for seq, table in tables.items():
            told = self.tables.setdefault(seq, [])
            if told == table or room == 0:
                continue
            num_same = num_common(told, table)
            new = table[num_same : num_same + room]
            room -= len(new)
            told[num_same:] = new
            news.append([seq.request.request_id, seq.index, num_same, new])
        return news


def num_common(one: list[int], other: list[int]) -> int:
    """How many items at their beginning are the same. Slices are compared much faster than their
    items in a loop, so each look halves what is left; the first one finds what has only grown."""
    low = 0
    high = middle = min(len(one), len(other))
    while low < high:
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


class Camera:
    """Takes pictures, each of which tells what is new since the one before."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.shown: list[Request] = []  # in the last picture
        self.begin = 0  # the block at which the next one begins to look
        self.start_over()

    def start_over(self) -> None:
        """Makes the next picture a whole one, for a new reader."""
        self.is_whole = True
        self.told = Told()
        self.told_of_host = Told()
        self.num_unseen = len(self.llm.block_manager.blocks)

    def frame(self, schedules: list[Schedule], seconds: float, now: float) -> dict[str, Any]:
        """The engine as it is now, after these steps, which took so many seconds. It covers all
        steps since the last picture, so that no copy is missed between two of them."""
        scheduler = self.llm.scheduler
        manager = self.llm.block_manager
        counts = self.llm.counts
        num_sampled = sum(len(schedule.sampled) for schedule in schedules)
        if schedules:
            self.num_unseen = len(manager.blocks)
        frame = {
            "step": counts.steps,
            "steps": len(schedules),
            "time": round(now, 4),
            "seconds": round(seconds, 4),
            "is_whole": self.is_whole,
            **self.requests(schedules),
            "block_size": manager.block_size,
            "cached": self.look(manager),
            "moves": moves_of(schedules),
            "kv_blocks": len(manager.blocks),
            "kv_blocks_used": manager.num_used_blocks,
            "host_blocks": len(manager.host_ref_counts),
            "host_blocks_used": len(manager.host_ref_counts) - len(manager.free_host_blocks),
            "preemptions": scheduler.num_preemptions,
            "prompt_tokens": scheduler.num_prompt_tokens,
            "prefix_cache_hit_tokens": scheduler.num_cached_tokens,
            **(scheduler.guesser.stats if scheduler.guesser else {}),
            "computed_tokens": counts.computed_tokens,
            "output_tokens": counts.output_tokens,
            "output_tokens_per_second": round(num_sampled / seconds, 1) if seconds else 0.0,
        }
        self.is_whole = False
        return frame

    def requests(self, schedules: list[Schedule]) -> dict[str, Any]:
        """Lists the requests that run, those that wait, in the order of the queue, with a mark if
        preempted, and those that have ended; and what is new in their block tables. Tokens are told
        of a few in each state."""
        running = self.llm.scheduler.running
        unfinished = dict.fromkeys(self.llm.scheduler.unfinished())
        for request in self.llm.requests.values():  # perhaps submitted, but not queued yet
            if request not in unfinished and (request.is_new or not request.has_ended):
                unfinished[request] = None
        listed = [*islice(unfinished, len(running) + MOST_WAITING)]
        queue = listed[len(running) :]
        waiting = [request for request in queue if request.num_cached_tokens is None]
        admitted = [request for request in queue if request.num_cached_tokens is not None]
        seqs = [seq for request in (*running, *admitted) for seq in request.sequences]
        host_tables = {seq: seq.host_table for seq in seqs if seq.host_table}
        on_host = {seq.request for seq in host_tables}
        preempted = [request for request in admitted if request not in on_host]
        swapped = [request for request in admitted if request in on_host]
        last_step = [item.seq.request for item in schedules[-1].items] if schedules else []
        before = dict.fromkeys([*self.shown, *last_step])
        self.shown = listed
        return {
            "running": ids_of(running),
            "queue": ids_of(queue),
            "preempted": ids_of(preempted),
            "swapped": ids_of(swapped),
            "ended": ids_of(request for request in before if request not in unfinished),
            "not_listed": len(unfinished) - len(listed),
            "requests": [
                row_of(request)
                for group in (running, preempted, swapped, waiting)
                for request in group[:MOST_ROWS]
            ],
            "tables": self.told.news({seq: seq.block_table for seq in seqs if seq.block_table}),
            "host_tables": self.told_of_host.news(host_tables),
        }

    def look(self, manager: BlockManager) -> list:
        """The first of some blocks, and for each of them "1" if it is free, but can be found by its
        prefix. A small cache is seen as a whole, a large one piece by piece, over and over."""
        begin = self.begin
        blocks = manager.blocks[begin : begin + MOST_LOOKED_AT]
        bits = ["1" if block.key and not block.ref_count else "0" for block in blocks]
        self.begin = (begin + len(blocks)) % len(manager.blocks)
        self.num_unseen = max(0, self.num_unseen - len(blocks))
        return [begin, "".join(bits)]


def ids_of(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def row_of(request: Request) -> dict[str, Any]:
    """Tokens are those of all its sequences, but the prompt, which they share, counts once."""
    # a request makes its sequences when they are first asked for: not by us
    seqs = [] if request.is_new else request.sequences
    num_prompt = len(request.prompt_token_ids)
    computed = [seq.num_computed_tokens for seq in seqs]
    of_prompt = max((min(num_prompt, n) for n in computed), default=0)
    of_outputs = sum(max(0, n - num_prompt) for n in computed)
    num_unfinished = sum(seq.finish_reason is None for seq in seqs)
    return {
        "id": request.request_id,
        "prompt": num_prompt,
        "output": sum(seq.num_output_tokens for seq in seqs),
        "computed": of_prompt + of_outputs,
        "sequences": request.params.n if request.is_new else num_unfinished,
    }


def moves_of(schedules: list[Schedule]) -> dict[str, list]:
    """Pairs of blocks: copied from and to, swapped out to the host's block, in from it."""
    moves = [schedule.moves for schedule in schedules if schedule.moves]
    copies = (copy for one in moves for copy in one.copies)
    swaps_out = (swap for one in moves for swap in one.swaps_out.items())
    swaps_in = (swap for one in moves for swap in one.swaps_in.items())
    pairs = {"copies": copies, "out": swaps_out, "in": swaps_in}
    return {kind: [*islice(those, MOST_TOLD)] for kind, those in pairs.items()}


class LiveView:
    """Sends frames while the engine runs. All methods belong to the engine's thread, and no frame
    is touched again after it was sent."""

    def __init__(
        self,
        llm: LLM,
        send: Callable[[dict], object],
        seconds_between: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.llm = llm
        self.send = send
        self.seconds_between = seconds_between
        self.clock = clock
        self.begin = self.last = clock()
        self.camera = Camera(llm)
        self.schedules: list[Schedule] = []  # since the last frame
        self.seconds = 0.0

    @property
    def is_watching(self) -> bool:
        return self._observe in self.llm.observers

    @property
    def has_more(self) -> bool:
        """Whether there are blocks that no frame has looked at since the last step."""
        return self.is_watching and self.camera.num_unseen > 0

    def start(self) -> None:
        """Begins to send frames, or begins anew, for one more reader; the first one at once."""
        if not self.is_watching:
            self.llm.observers.append(self._observe)
        self.camera.start_over()
        self.flush()

    def stop(self) -> None:
        if self.is_watching:
            self.llm.observers.remove(self._observe)
        self.camera = Camera(self.llm)
        self._forget()

    def flush(self) -> None:
        """Sends what is now. For an engine that becomes idle: what has ended is gone, and what was
        held back is not lost. Also for a new reader."""
        if not self.is_watching:
            return
        with self.llm.turns.take():
            if self.schedules:
                self._send()
            self._send()

    def _observe(self, schedule: Schedule, seconds: float) -> None:
        self.schedules.append(schedule)
        self.seconds += seconds
        if self.clock() - self.last >= self.seconds_between:
            self._send()

    def _send(self) -> None:
        self.last = self.clock()
        frame = self.camera.frame(self.schedules, self.seconds, self.last - self.begin)
        self._forget()
        self.send(frame)

    def _forget(self) -> None:
        self.schedules = []
        self.seconds = 0.0
