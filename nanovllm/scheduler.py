"""Scheduler: who runs in the next step, and with how many tokens. Imports no torch.

There is no prefill phase and no decode phase. Every sequence has tokens whose keys and values are not in the cache yet:
all of them for a new prompt, one for a decoding sequence. A step computes as many as the budget and the blocks allow
(iteration-level scheduling as in Orca, chunked prefill as in Sarathi-Serve).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial

from nanovllm.beam_search import Likeliest, take_beams
from nanovllm.block_manager import BlockManager
from nanovllm.config import Limits
from nanovllm.options import shown
from nanovllm.sequence import Request, Sequence

Logprobs = list[dict[int, float] | None]  # of each sampled sequence, if it wants any


class ScheduleError(RuntimeError):
    """A scheduler has planned a step that cannot be run. The message is one sentence for the scheduler's author."""

    def __init__(self, scheduler: Scheduler, method: str, problem: str):
        super().__init__(f"{type(scheduler).__name__}.{method}(): {problem}")


@dataclass
class Schedule:
    """One step: its sequences, how many tokens to compute for each, and which blocks to move first.

    Blocks are swapped out first, then in, then copied: the targets may be blocks that were swapped out.
    """

    items: list[tuple[Sequence, int]] = field(default_factory=list)
    swaps_out: dict[int, int] = field(default_factory=dict)  # block -> host block
    swaps_in: dict[int, int] = field(default_factory=dict)  # host block -> block
    copies: list[tuple[int, int]] = field(
        default_factory=list
    )  # copy-on-write: from block, to block
    tokens_left: int = 0  # while it is planned: how many more tokens may be added, ...
    prompt_tokens_left: int = 0  # ... and how many of them for sequences that lack more than one

    @property
    def num_tokens(self) -> int:
        return sum(n for _, n in self.items)

    def part_of(self, seq: Sequence, num_tokens: int) -> list[tuple[Sequence, int]]:
        """The sequence, and how many of these tokens still fit. Called while there is room for one."""
        if num_tokens > 1:
            num_tokens = min(num_tokens, self.tokens_left, self.prompt_tokens_left)
        return [(seq, num_tokens)] if num_tokens > 0 else []

    @cached_property
    def sampled_items(self) -> list[tuple[int, Sequence]]:
        """(index of an item, sequence) for each sequence whose last token is computed in this step, so that its next
        one is drawn. Valid once the schedule is complete. Before a request forks, all its sequences draw from the
        logits of the first."""
        return [
            (i, member)
            for i, (seq, num_tokens) in enumerate(self.items)
            if seq.num_computed_tokens + num_tokens == len(seq.token_ids)
            for member in ([seq] if seq.request.has_forked else seq.request.unfinished)
        ]

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a next token."""
        return [seq for _, seq in self.sampled_items]


class Scheduler:
    """First come, first served, within a budget of tokens and sequences (paper, section 4.5).

    The first methods are the policy: each says what is to be done, in a line, and is there to be overridden. The others
    do it. A policy may choose anybody and refuse anything; which block is whose and what fits is decided below.
    """

    watermark = (
        0.05  # part of the blocks that admission leaves free, so that those who run can grow
    )

    def __init__(self, limits: Limits, block_manager: BlockManager):
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.max_num_seqs = limits.max_num_seqs
        self.max_model_len = limits.max_model_len
        self.block_manager = block_manager
        self.clock = time.monotonic  # in seconds; a simulator has its own
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_swapped_blocks = 0  # swapped out to the host
        self.num_prompt_tokens = 0  # of all requests, counted when first admitted ...
        self.num_cached_tokens = 0  # ... and how many of them were in the prefix cache

    # --- policy ---

    def priority(self, request: Request):
        """Sort key: the waiting request with the smallest is admitted first. Asked for in each step that may admit."""
        return request.arrival

    def running_order(self, request: Request):
        """Sort key: the running request with the smallest is given tokens first."""
        return self.priority(request)

    def next_waiting(self) -> Request | None:
        """Which request to admit next, if it fits; None for no more in this step. `waiting` is sorted by priority."""
        return self.waiting[0] if self.waiting else None

    def may_admit(self, request: Request, schedule: Schedule) -> bool:
        """Whether to admit the request, which fits. If not, nobody else is admitted in this step."""
        return True

    def step_budget(self) -> tuple[int, int]:
        """Maximum tokens of the step, up to `max_num_batched_tokens`; and how many of them may go to sequences that
        lack more than one: prompts, and what is recomputed."""
        return self.max_num_batched_tokens, self.max_num_batched_tokens

    def victim(self, candidates: list[Request]) -> Request:
        """Who loses its blocks, because there are too few. The candidates are in running order."""
        return candidates[-1]

    def should_swap(self, request: Request) -> bool:
        """Whether a preempted request's blocks go to host memory, if there is room, rather than being computed again."""
        return True

    def make_room(self, schedule: Schedule) -> None:
        """Called before the step is planned. May `preempt` running requests for the sake of waiting ones."""

    # --- a request comes ---

    def add(self, request: Request) -> None:
        """Queues a request. The engine has checked it before; others may not have."""
        self.check(request)
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """Raises ValueError if the request could not finish even with the whole cache to itself. Sets its `max_len`."""
        prompt, params, manager = len(request.prompt_token_ids), request.params, self.block_manager
        name_of_n = "n" if request.beam_search is None else "beam_width"
        if prompt + 1 > self.max_model_len:
            room = f"max_model_len={self.max_model_len} leaves room for at most {self.max_model_len - 1}"
            raise ValueError(f"the prompt has {prompt} tokens, but {room} and one new token")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if params.n > (limit := getattr(self, name)):
                raise ValueError(
                    f"{name_of_n}={shown(params.n)} is not allowed: it must be at most {name}={limit}"
                )
        request.max_len = min(prompt + params.max_tokens, self.max_model_len)
        blocks, total = manager.max_blocks_needed(request), len(manager.blocks)
        if blocks > total:
            size = f"{manager.block_size} tokens (prompt of {prompt} tokens, max_tokens={params.max_tokens}"
            need = f"{blocks} KV blocks of {size}, {name_of_n}={params.n})"
            raise ValueError(f"the request may need {need}, but num_blocks={total}")

    # --- a step is planned ---

    def schedule(self) -> Schedule:
        """Plans a step: running requests first, then waiting ones. Everything in the plan has its blocks."""
        schedule = Schedule()
        schedule.tokens_left, schedule.prompt_tokens_left = self.step_budget()
        self.make_room(schedule)
        num_preemptions = self.num_preemptions
        self._schedule_running(schedule)
        if (
            self.waiting and self.num_preemptions == num_preemptions
        ):  # otherwise there is no room for any
            self._schedule_waiting(schedule)
        self.num_swapped_blocks += len(schedule.swaps_out)
        return schedule

    def _schedule_running(self, schedule: Schedule) -> None:
        self.running.sort(key=self.running_order)
        i = 0
        while i < len(self.running) and schedule.tokens_left > 0:
            request = self.running[i]
            items = self._tokens_to_compute(request, schedule)
            while not self.block_manager.can_allocate(items) and i < len(self.running):
                # never one that has its tokens, nor this one before those behind it: so the first always gets ahead
                self.preempt(self.victim(self.running[i + 1 :] or [request]), schedule)
            if i < len(self.running):  # otherwise it was itself the last one and was preempted
                self._commit(items, schedule)
                i += 1

    def _schedule_waiting(self, schedule: Schedule) -> None:
        manager, num_seqs = self.block_manager, sum(request.num_seats for request in self.running)
        if num_seqs < self.max_num_seqs:
            self.waiting.sort(key=self.priority)
        reserved = sum(
            manager.num_blocks_at_fork(request)
            for request in self.running
            if not request.has_forked
        )
        while min(schedule.tokens_left, schedule.prompt_tokens_left) > 0 and (
            request := self.next_waiting()
        ):
            num_seqs += request.num_seats
            kept = int(self.watermark * len(manager.blocks)) if self.running else 0
            fits = num_seqs <= self.max_num_seqs and manager.can_admit(request, reserved + kept)
            if not (fits and self.may_admit(request, schedule)):
                break
            self._admit(request, schedule)
            self._commit(self._tokens_to_compute(request, schedule), schedule)
            if not request.has_forked:
                reserved += manager.num_blocks_at_fork(request)

    def _admit(self, request: Request, schedule: Schedule) -> None:
        """Gives it blocks for all its tokens, even if they are computed in chunks; otherwise it would soon be preempted
        in the middle of its prompt. Tokens that are still in the cache or on the host are not computed again."""
        check_choice(self, "next_waiting", request, self.waiting)
        self.waiting.remove(request)
        self.running.append(request)
        manager, (first, *others) = self.block_manager, request.unfinished
        manager.take_prefix(first)
        if first.host_table:
            manager.swap_in(first, schedule.swaps_in)
        request.has_forked = not others
        if others:
            request.num_shared_tokens = common_length([seq.token_ids for seq in request.unfinished])
            self._fork(request, schedule)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = first.num_computed_tokens
            self.num_cached_tokens += request.num_cached_tokens
            self.num_prompt_tokens += len(request.prompt_token_ids)
        for seq in request.unfinished:
            if seq.host_table:
                manager.free_host(seq)
        for seq in request.unfinished if request.has_forked else [first]:
            schedule.copies += manager.allocate(seq, len(seq.token_ids) - seq.num_computed_tokens)

    def _tokens_to_compute(
        self, request: Request, schedule: Schedule
    ) -> list[tuple[Sequence, int]]:
        """The request's sequences and how many of their missing tokens to compute, as far as the budgets go."""
        seqs = request.unfinished if request.params.n > 1 else request.sequences
        if len(seqs) > 1:
            return self._tokens_of_group(request, schedule)
        return schedule.part_of(seqs[0], len(seqs[0].token_ids) - seqs[0].num_computed_tokens)

    def _commit(self, items: list[tuple[Sequence, int]], schedule: Schedule) -> None:
        """Gives each sequence its blocks and adds it to the schedule."""
        manager = self.block_manager
        for seq, num_tokens in items:
            end = seq.num_computed_tokens + num_tokens
            schedule.copies += manager.allocate(seq, num_tokens)
            if end // manager.block_size > len(seq.prefix_ids):  # a block becomes full
                manager.publish(seq, end)
            schedule.tokens_left -= num_tokens
            if len(seq.token_ids) - seq.num_computed_tokens > 1:
                schedule.prompt_tokens_left -= num_tokens
        schedule.items += items

    def preempt(self, request: Request, schedule: Schedule) -> None:
        """All or nothing: all sequences of the running request lose their blocks and wait. The host keeps the contents
        if it has room; otherwise they are computed again."""
        check_choice(self, "preempt", request, self.running)
        self.running.remove(request)
        if self.should_swap(request):
            self.block_manager.swap_out(request.unfinished, schedule.swaps_out)
        for seq in request.unfinished:
            self.block_manager.free(seq)
        request.has_forked = False
        self.waiting.append(request)
        self.num_preemptions += 1

    # --- a step has run ---

    def update(
        self, schedule: Schedule, token_ids: list[int], logprobs: Logprobs | None = None
    ) -> None:
        """Processes a step's result: a token for each of `schedule.sampled`, and its log-probabilities if requested."""
        sampled, searches = schedule.sampled_items, dict[Request, Likeliest]()
        self.block_manager.unwritten.clear()
        for seq, num_tokens in schedule.items:
            seq.num_computed_tokens += num_tokens
            if not seq.request.has_forked:
                self._fork(seq.request, schedule)
        logprobs = [None] * len(sampled) if logprobs is None else logprobs
        for (_, seq), token_id, likeliest in zip(sampled, token_ids, logprobs, strict=True):
            if seq.request.beam_search is not None:
                searches.setdefault(seq.request, []).append((seq, likeliest or {}))
                continue
            if seq.logprobs is not None:
                seq.logprobs.append(likeliest or {})
            seq.token_ids.append(token_id)
            if (reason := self.reason_to_end(seq)) is not None:
                self.finish(seq, reason)
        for request, beams in searches.items():
            take_beams(request, beams, self.block_manager)
            if not request.unfinished:
                self.running.remove(request)

    def reason_to_end(self, seq: Sequence) -> str | None:
        """Why the sequence ends with its last token, or None. Stop strings are the engine's business."""
        request, num_tokens = seq.request, len(seq.token_ids)
        if (
            num_tokens > len(request.prompt_token_ids)
            and seq.token_ids[-1] in request.stop_token_ids
        ):
            return "stop"
        return "length" if num_tokens >= request.max_len else None

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends one sequence. The request ends with its last sequence."""
        seq.finish_reason = reason
        self.block_manager.free(seq)
        if seq.host_table:
            self.block_manager.free_host(seq)
        for queue in (self.running, self.waiting):
            if not seq.request.unfinished and seq.request in queue:
                queue.remove(seq.request)

    def abort(self, request: Request) -> None:
        """Ends all unfinished sequences of the request, whether it runs or waits."""
        for seq in request.sequences:
            self.finish(seq, seq.finish_reason or "abort")

    def restart(self, requests: Iterable[Request], block_manager: BlockManager) -> None:
        """Starts over with these requests and an empty cache, after a step whose effects are unknown."""
        self.waiting, self.running, self.block_manager = list(requests), [], block_manager
        for request in self.waiting:
            request.rewind()

    def unfinished(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    # --- second reading: several sequences of one request ---

    def _tokens_of_group(self, request: Request, schedule: Schedule) -> list[tuple[Sequence, int]]:
        """They get their next tokens together or not at all, so their last tokens are computed in the same step."""
        seqs = request.unfinished
        if not request.has_forked:
            return schedule.part_of(
                seqs[0], request.num_shared_tokens - seqs[0].num_computed_tokens
            )
        missing = [seq.num_missing_tokens for seq in seqs]
        if max(missing) == 1:
            return [(seq, 1) for seq in seqs] if len(seqs) <= schedule.tokens_left else []
        items, budget = [], min(schedule.tokens_left, schedule.prompt_tokens_left)
        for seq, num_tokens in zip(seqs, missing):
            num_tokens = min(num_tokens - 1, budget)
            if num_tokens > 0:
                items.append((seq, num_tokens))
                budget -= num_tokens
        return items

    def _fork(self, request: Request, schedule: Schedule) -> None:
        """Once the first sequence has computed the tokens that all share, the others fork from it."""
        manager, shared, (first, *others) = (
            self.block_manager,
            request.num_shared_tokens,
            request.unfinished,
        )
        if first.num_computed_tokens < shared:
            return
        for seq in others:
            if len(seq) > shared:  # it was preempted: its own blocks may still be in the cache
                manager.fork(first, seq, shared // manager.block_size * manager.block_size)
                manager.take_prefix(seq)
                if seq.num_host_tokens >= shared:
                    manager.swap_in(seq, schedule.swaps_in)
            if seq.num_computed_tokens < shared:
                manager.free(seq)
                manager.fork(first, seq, shared)
        request.has_forked = True


def common_length(sequences: list[list[int]]) -> int:
    """Length of the prefix that all of them share. They must be equally long."""
    columns = enumerate(zip(*sequences))
    return next((i for i, column in columns if len(set(column)) > 1), len(sequences[0]))


# --- second reading: what can be wrong with a schedule ---


def check_choice(
    scheduler: Scheduler, method: str, request: Request, candidates: list[Request]
) -> None:
    """Raises ScheduleError if a policy has chosen somebody else than one of the candidates."""
    if request not in candidates:
        raise ScheduleError(
            scheduler, method, f"{shown(request)} is not one of {shown(candidates)}"
        )


def check_schedule(
    schedule: Schedule, scheduler: Scheduler, request_ids: Collection[str], moves_before: int
) -> None:
    """Raises ScheduleError if the schedule cannot be run. Before it was planned, the requests with these ids were
    unfinished, and the block manager had asked for `moves_before` moves."""
    manager, running = scheduler.block_manager, set(scheduler.running)
    wrong = partial(ScheduleError, scheduler, "schedule")
    if not isinstance(schedule, Schedule):
        raise wrong(f"it returned {shown(schedule)}, and not a Schedule")
    if not schedule.items:
        lost = set(request_ids) - {request.request_id for request in scheduler.unfinished()}
        why = (
            f"neither waiting nor running: {shown(sorted(lost))}"
            if lost
            else "the policy serves nobody"
        )
        raise wrong(
            f"it planned nothing, but there are unfinished requests: {shown([*request_ids])}; {why}"
        )
    size, blocks, unwritten, written = (
        manager.block_size,
        manager.blocks,
        manager.unwritten,
        set[int](),
    )
    seqs = set[Sequence]()
    for seq, num_tokens in schedule.items:
        begin, table = seq.num_computed_tokens, seq.block_table
        end = begin + num_tokens
        if seq in seqs:
            raise wrong(f"{seq} is in the schedule twice")
        seqs.add(seq)
        if seq.request not in running or seq.finish_reason is not None:
            raise wrong(
                f"{seq} is in the schedule, but it has ended, or its request is not in scheduler.running"
            )
        if num_tokens < 1 or end > len(seq.token_ids):
            raise wrong(
                f"{seq} is to compute {num_tokens} tokens, but {seq.num_missing_tokens} are missing"
            )
        if end > len(table) * size:
            raise wrong(
                f"{seq} is to compute {num_tokens} tokens, but lacks blocks for them: allocate them first"
            )
        block_id = table[begin // size]
        if blocks[block_id].ref_count > 1 and block_id not in unwritten:
            raise wrong(
                f"{seq} is to write into block {block_id}, which others read: allocate says what to copy first"
            )
        if unwritten:
            written.update(table[begin // size : end // size])
    sampled = {seq for _, seq in schedule.sampled_items}
    for request in {seq.request for seq in sampled if seq.request.params.n > 1}:
        drawn = sampled.intersection(unfinished := request.unfinished)
        if len(drawn) < len(unfinished):
            who = f"{len(drawn)} of {len(unfinished)} sequences of {request.request_id}"
            raise wrong(f"{who} would get a token: it must be all or none")
    for total, limit in (
        (schedule.num_tokens, "max_num_batched_tokens"),
        (len(seqs), "max_num_seqs"),
    ):
        if total > getattr(scheduler, limit):
            raise wrong(
                f"the schedule has {total} {limit.split('_')[-1]}, but {limit}={getattr(scheduler, limit)}"
            )
    lost_blocks = manager.unwritten - written
    if lost_blocks:
        raise wrong(
            f"no sequence computes blocks {lost_blocks}, which can be found: keep all that _commit plans"
        )
    listed = len(schedule.copies) + len(schedule.swaps_out) + len(schedule.swaps_in)
    asked = manager.num_moves - moves_before
    if listed != asked:
        why = f"the block manager asked for {asked}: all that it asks for belongs in the step's schedule"
        raise wrong(f"the schedule lists {listed} blocks to copy and swap, but {why}")
