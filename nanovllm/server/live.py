"""The live view: pictures of the engine after its steps, for the page to draw.

Nothing of this is in the engine's way: it is an observer, and it is there only while a page
watches.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from itertools import groupby, repeat
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLM
from nanovllm.schedule import Schedule
from nanovllm.sequence import Request, Sequence

EMPTY = ("empty",)
CACHED = ("cached",)


def frame_of(llm: LLM, schedules: list[Schedule], seconds: float, now: float) -> dict[str, Any]:
    """A picture of the engine as it is now, after these steps, which took so many seconds. It
    covers all steps since the last picture, so that no copy is missed between two of them."""
    scheduler = llm.scheduler
    manager = llm.block_manager
    items = [item for schedule in schedules for item in schedule.items]
    served = Counter({item.seq.request: 0 for item in items})
    for seq, _, num_tokens in items:
        served[seq.request] += num_tokens
    # those that have ended in these steps come last
    requests = [*dict.fromkeys([*scheduler.unfinished(), *llm.requests.values(), *served])]
    running = set(scheduler.running)
    num_sampled = sum(len(schedule.sampled) for schedule in schedules)
    return {
        "step": llm.counts.steps,
        "steps": len(schedules),
        "time": round(now, 4),
        "seconds": round(seconds, 4),
        "requests": [request_now(r, state_of(r, running), served[r]) for r in requests],
        "block_size": manager.block_size,
        "blocks": run_lengths(manager, requests),
        "moves": moves_of(schedules),
        "kv_blocks": len(manager.blocks),
        "kv_blocks_used": manager.num_used_blocks,
        "host_blocks": len(manager.host_ref_counts),
        "host_blocks_used": len(manager.host_ref_counts) - len(manager.free_host_blocks),
        "preemptions": scheduler.num_preemptions,
        "prompt_tokens": scheduler.num_prompt_tokens,
        "prefix_cache_hit_tokens": scheduler.num_cached_tokens,
        "computed_tokens": llm.counts.computed_tokens,
        "output_tokens": llm.counts.output_tokens,
        "output_tokens_per_second": round(num_sampled / seconds, 1) if seconds else 0.0,
    }


def sequences_of(request: Request) -> list[Sequence]:
    """A request makes its sequences when they are first asked for: not by us."""
    return [] if request.is_new else request.sequences


def state_of(request: Request, running: set[Request]) -> str:
    if not request.is_new and request.has_ended:
        return "ended"
    if request in running:
        return "running"
    if request.num_cached_tokens is None:  # it has never been admitted
        return "waiting"
    is_swapped = any(seq.host_table for seq in sequences_of(request))
    return "swapped" if is_swapped else "preempted"


def request_now(request: Request, state: str, num_tokens: int) -> dict[str, Any]:
    """Tokens are those of all its sequences, but the prompt, which they share, counts once."""
    seqs = sequences_of(request)
    num_prompt = len(request.prompt_token_ids)
    computed = [seq.num_computed_tokens for seq in seqs]
    of_prompt = max((min(num_prompt, n) for n in computed), default=0)
    of_outputs = sum(max(0, n - num_prompt) for n in computed)
    unfinished = [seq for seq in seqs if seq.finish_reason is None]
    return {
        "id": request.request_id,
        "state": state,
        "prompt": num_prompt,
        "output": sum(seq.num_output_tokens for seq in seqs),
        "computed": of_prompt + of_outputs,
        "sequences": request.params.n if request.is_new else len(unfinished),
        "tokens": num_tokens,
    }


def run_lengths(manager: BlockManager, requests: list[Request]) -> list[list]:
    """All blocks in their order, as runs of equal ones: [how many, "empty"], [how many, "cached"],
    or [how many, index of the request that owns them, how many sequences share each]."""
    states: dict[int, tuple] = {}
    for block in manager.findable.values():
        if block.ref_count == 0:
            states[block.id] = CACHED
    for i, request in enumerate(requests):
        for seq in sequences_of(request):
            for block_id in seq.block_table:
                states.setdefault(block_id, (i, manager.blocks[block_id].ref_count))
    in_order = map(states.get, range(len(manager.blocks)), repeat(EMPTY))
    return [[len([*run]), *state] for state, run in groupby(in_order)]


def moves_of(schedules: list[Schedule]) -> dict[str, list]:
    """Pairs of blocks: copied from and to, swapped out to the host's block, in from it."""
    moves = [schedule.moves for schedule in schedules]
    return {
        "copies": [[*copy] for one in moves for copy in one.copies],
        "out": [[*swap] for one in moves for swap in one.swaps_out.items()],
        "in": [[*swap] for one in moves for swap in one.swaps_in.items()],
    }


class LiveView:
    """Sends frames as JSON while the engine runs. All methods belong to the engine's thread."""

    def __init__(
        self,
        llm: LLM,
        send: Callable[[str], object],
        seconds_between: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.llm = llm
        self.send = send
        self.seconds_between = seconds_between
        self.clock = clock
        self.begin = self.last = clock()
        self.schedules: list[Schedule] = []  # since the last frame
        self.seconds = 0.0

    @property
    def is_watching(self) -> bool:
        return self._observe in self.llm.observers

    def start(self) -> None:
        """Begins to send frames; the first one at once."""
        if not self.is_watching:
            self.llm.observers.append(self._observe)
        self.flush()

    def stop(self) -> None:
        if self.is_watching:
            self.llm.observers.remove(self._observe)
        self._forget()

    def flush(self) -> None:
        """Sends what is now. For an engine that becomes idle: what has ended is gone, and what was
        held back is not lost. Also for a new reader, who has seen nothing yet."""
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
        frame = frame_of(self.llm, self.schedules, self.seconds, self.last - self.begin)
        self._forget()
        self.send(json.dumps(frame, separators=(",", ":")))

    def _forget(self) -> None:
        self.schedules = []
        self.seconds = 0.0
