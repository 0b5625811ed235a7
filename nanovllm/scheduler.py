"""Scheduler: which requests run in the next step, with how many tokens. Imports no torch.

There is no prefill phase and no decode phase. Every sequence has tokens whose keys and values are
not in the cache yet: all of them for a new prompt, one for a decoding sequence. A step computes as
many as the budget and the blocks allow (iteration-level scheduling as in Orca, chunked prefill as
in Sarathi-Serve).
"""

from __future__ import annotations

import time
from bisect import insort
from typing import TYPE_CHECKING

from nanovllm.block_manager import BlockManager
from nanovllm.config import Limits
from nanovllm.options import PromptTooLong, refusal
from nanovllm.sampling_params import LARGEST_COUNT
from nanovllm.schedule import Item, Schedule, ScheduleError, check_choice
from nanovllm.sequence import NewTokens, Request, Sequence, StepLogprobs, TokenLogprobs

if TYPE_CHECKING:
    from nanovllm.topics.decoding.drafts import Proposer


class Scheduler:
    """First come, first served, within a budget of tokens and sequences (paper, section 4.5).

    The first methods are the policy: subclasses override them. The other methods carry it out, and
    decide which blocks a request gets. A policy may pick any waiting request, or none.
    """

    # the part of the blocks that admission leaves free, so that running requests can grow
    watermark = 0.05
    # whether no step of this very class is checked; a subclass does not inherit it
    is_trusted = True
    # True promises that a request's priority never changes: `waiting` is then kept sorted
    priority_is_fixed = False

    def __init__(self, limits: Limits, block_manager: BlockManager):
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.max_num_seqs = limits.max_num_seqs
        self.max_model_len = limits.max_model_len
        self.block_manager = block_manager
        self.proposer: Proposer | None = None  # of draft tokens: the engine sets it
        self.clock = time.monotonic  # in seconds; a simulator has its own
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_swapped_blocks = 0  # swapped out to the host
        self.num_prompt_tokens = 0  # of all requests, counted when first admitted ...
        self.num_cached_tokens = 0  # ... and how many of them were in the prefix cache ...
        self.num_host_cached_tokens = 0  # ... only on the host

    # --- policy ---

    def priority(self, request: Request):
        """Sort key: the waiting request with the smallest key is admitted first. Called again in
        every step that can admit requests, unless `priority_is_fixed`."""
        return request.user_priority, request.arrival

    def running_order(self, request: Request):
        """Sort key: the running request with the smallest key gets tokens first."""
        return self.priority(request)

    def next_waiting(self) -> Request | None:
        """The request to admit next, if it fits. None ends admission for this step. `waiting` is
        sorted by priority."""
        return self.waiting[0] if self.waiting else None

    def may_admit(self, request: Request, schedule: Schedule) -> bool:
        """Whether to admit this request (it fits). False ends admission for this step."""
        return True

    def step_budget(self) -> tuple[int, int]:
        """The token budget of the step, at most `max_num_batched_tokens`; and how many of these
        tokens may go to sequences with more than one missing token: prompts, and recomputed
        sequences."""
        return self.max_num_batched_tokens, self.max_num_batched_tokens

    def victim(self, candidates: list[Request]) -> Request:
        """The request to preempt when blocks run out. The candidates are in running order."""
        return candidates[-1]

    def should_swap(self, request: Request) -> bool:
        """Whether a preempted request's blocks go to host memory, if there is room, instead of
        being recomputed."""
        return True

    def make_room(self, schedule: Schedule) -> None:
        """Called before the step is planned. May `preempt` running requests for waiting ones."""

    def num_draft_tokens(self, request: Request) -> int:
        """How many draft tokens to propose for each of the request's sequences (chapter 22). A step
        takes fewer if the token budget or the blocks run out."""
        return self.proposer.config.num_speculative_tokens if self.proposer else 0

    def reason_to_end(self, seq: Sequence) -> str | None:
        """The reason why the sequence ends with its last token, or None. The engine looks for stop
        strings."""
        request = seq.request
        if seq.token_ids[-1] in request.stop_token_ids and seq.num_output_tokens > 0:
            return "stop"
        return "length" if len(seq.token_ids) >= request.max_len else None

    # --- a request comes ---

    def add(self, request: Request) -> None:
        """Queues a request. The engine has checked it before; others may not have."""
        if not request.max_len:
            self.set_max_len(request)
        self.enqueue(request)

    def set_max_len(self, request: Request) -> None:
        """Sets the request's `max_len`. Raises ValueError if it could not finish even with the
        whole cache to itself."""
        num_prompt = len(request.prompt_token_ids)
        params = request.params
        if num_prompt + 1 > self.max_model_len:
            room = f"at most {self.max_model_len - 1} and one new token"
            limit = f"max_model_len={self.max_model_len} leaves room for {room}"
            raise PromptTooLong(f"the prompt has {num_prompt} tokens, but {limit}")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            limit = getattr(self, name)
            if params.n > limit:
                raise refusal(request.name_of_n, params.n, f"it must be at most {name}={limit}")
        manager = self.block_manager
        assert params.max_tokens is not None  # SamplingParams has put LARGEST_COUNT for it
        request.max_len = min(num_prompt + params.max_tokens, self.max_model_len)
        if params.max_tokens == LARGEST_COUNT:  # as many as fit
            longest = max(num_prompt + 1, manager.longest_that_fits(request))
            request.max_len = min(request.max_len, longest)
        needed = manager.max_blocks_needed(request)
        if needed > len(manager.blocks):
            max_tokens = None if params.max_tokens == LARGEST_COUNT else params.max_tokens
            what = f"prompt of {num_prompt} tokens, {max_tokens=}, {request.name_of_n}={params.n}"
            size = f"{manager.block_size} tokens ({what})"
            why = f"{needed} KV blocks of {size}, but num_blocks={len(manager.blocks)}"
            raise ValueError(f"the request may need {why}")

    # --- a step is planned ---

    def schedule(self) -> Schedule:
        """Plans a step. Every item of the plan has its blocks.

        In this order: `step_budget`, `make_room`, running requests, waiting requests (not if
        `schedule_running` has preempted one), draft tokens if there is a proposer; then the moves,
        and the number of used blocks. `num_swapped_blocks` counts blocks that are swapped out.
        """
        schedule = Schedule(*self.step_budget())
        self.make_room(schedule)
        num_preemptions = self.num_preemptions
        self.schedule_running(schedule)
        if self.num_preemptions == num_preemptions:  # otherwise there is no room
            self.schedule_waiting(schedule)
        if self.proposer is not None:
            wanted = self.num_draft_tokens
            self.proposer.add_drafts(schedule, self.running, self.block_manager, wanted)
        schedule.moves = self.block_manager.take_moves()
        schedule.num_used_blocks = self.block_manager.num_used_blocks
        self.num_swapped_blocks += len(schedule.moves.swaps_out)
        return schedule

    def schedule_running(self, schedule: Schedule) -> None:
        """Gives running requests their missing tokens. If blocks run out, a request later in the
        running order is preempted, or else the request itself. So the first request always makes
        progress."""
        self.running.sort(key=self.running_order)
        i = 0
        while i < len(self.running) and schedule.tokens_left > 0:
            request = self.running[i]
            items = self.tokens_to_compute(request, schedule)
            while not self.block_manager.can_allocate(items):
                behind = self.running[i + 1 :]
                if not behind:
                    self.preempt(request)
                    return  # no request was left to give way
                victim = self.victim(behind)
                self.preempt(victim)
                if victim in self.running:
                    raise ScheduleError(self, "preempt", f"{victim} is still running")
            self.commit(items, schedule)
            i += 1

    def schedule_waiting(self, schedule: Schedule) -> None:
        """Admits waiting requests in the policy's order, while both budgets have tokens left, up to
        the first request that does not fit. A request that fits is admitted if `may_admit` agrees.
        """
        if len(self.running) >= self.max_num_seqs:
            return  # a request has at least one sequence
        if not self.keeps_order:
            self.waiting.sort(key=self.priority)
        while schedule.tokens_left > 0 and schedule.prompt_tokens_left > 0:
            request = self.next_waiting()
            if request is None or not self._fits(request):
                break
            if not self.may_admit(request, schedule):
                break
            self.admit(request)
            self.commit(self.tokens_to_compute(request, schedule), schedule)

    def _fits(self, request: Request) -> bool:
        """Whether `max_num_seqs` and the free blocks leave room for the request. Each request
        counts with its `most_sequences`. Some blocks are reserved: int(watermark * blocks) if a
        request runs, and what running requests will need at their fork."""
        manager = self.block_manager
        num_seqs = sum(r.most_sequences for r in [*self.running, request])
        # for samples that will fork from a running request
        promised = sum(manager.num_blocks_at_fork(r) for r in self.running if not r.has_forked)
        spare = int(self.watermark * len(manager.blocks)) if self.running else 0
        return num_seqs <= self.max_num_seqs and manager.can_admit(request, promised + spare)

    def admit(self, request: Request) -> None:
        """Admits a waiting request, and allocates blocks for all its tokens, even if they are
        computed in chunks: otherwise the request would soon be preempted in the middle of its
        prompt. Tokens that are cached or on the host are not computed again.

        In this order: the first unfinished sequence takes its prefix, then what the host has (of
        prefixes that were evicted, then of its own blocks); for
        several unfinished ones, `groups.share` finds the tokens that they have in common; at the
        first admission, hits and prompt tokens are counted; host blocks are freed; blocks are
        allocated. A single unfinished sequence has its own blocks, so `has_forked` is True; for
        several, `groups.fork` sets it.
        Raises ScheduleError for `next_waiting` if the request does not wait: see check_choice.
        """
        check_choice(self, "next_waiting", request, self.waiting)
        self.waiting.remove(request)
        self.running.append(request)
        manager = self.block_manager
        first, *others = request.unfinished
        manager.take_prefix(first)
        if manager.host is not None:
            from nanovllm.topics.swapping.blocks import bring_back, swap_in  # chapter 04

            num_on_host = bring_back(manager, first)
            if request.num_cached_tokens is None:
                self.num_host_cached_tokens += num_on_host * manager.block_size
            swap_in(manager, first)
        request.has_forked = not others
        if others:
            from nanovllm.topics.decoding import groups  # chapter 13

            groups.share(request, manager)
        if request.num_cached_tokens is None:  # it runs for the first time
            request.num_cached_tokens = first.num_computed_tokens
            self.num_cached_tokens += request.num_cached_tokens
            self.num_prompt_tokens += len(request.prompt_token_ids)
        if first.host_table:  # then the others may have some, too
            for seq in request.unfinished:
                self._free_host(seq)
        for seq in request.unfinished if request.has_forked else [first]:
            manager.allocate(seq, len(seq.token_ids) - seq.num_computed_tokens)

    def tokens_to_compute(self, request: Request, schedule: Schedule) -> list[Item]:
        """The missing tokens of each of the request's sequences, as many as the budgets allow. The
        last token of a full answer is never fed to the model, even if it is pending: see
        device/overlap.py. For several unfinished sequences see groups.tokens_to_compute."""
        # a running request with a single sequence has not finished it
        seqs = request.unfinished if request.params.n > 1 else request.sequences
        if len(seqs) > 1:
            from nanovllm.topics.decoding import groups  # chapter 13

            return groups.tokens_to_compute(request, schedule)
        seq = seqs[0]
        num_fed = min(len(seq.token_ids), request.max_len - 1)
        return schedule.next_tokens(seq, num_fed - seq.num_computed_tokens)

    def commit(self, items: list[Item], schedule: Schedule) -> None:
        """Allocates blocks for each item, caches the blocks that become full, and adds the item to
        the schedule. A block whose last token is pending, a negative id, is not cached yet: see
        device/overlap.py."""
        manager = self.block_manager
        for item in items:
            seq, start, num_tokens = item
            manager.allocate(seq, num_tokens)
            end = start + num_tokens
            # a block becomes full; if its last token is pending, `_append` caches the block
            if end // manager.block_size > len(seq.prefix_ids) and seq.token_ids[-1] >= 0:
                manager.cache_full_blocks(seq, end)
            schedule.add(item)

    def preempt(self, request: Request) -> None:
        """Frees the blocks of all sequences of a running request, and queues the request again. Its
        blocks go to host memory if there is room; otherwise their tokens are recomputed. Resets
        `has_forked`. Raises ScheduleError for `preempt` if the request does not run: see
        check_choice."""
        check_choice(self, "preempt", request, self.running)
        self.running.remove(request)
        if self.block_manager.host is not None and self.should_swap(request):
            from nanovllm.topics.swapping.blocks import swap_out  # chapter 04

            swap_out(self.block_manager, request.unfinished)
        for seq in request.unfinished:
            self.block_manager.free(seq)
        request.has_forked = False
        self.enqueue(request)
        self.num_preemptions += 1

    # --- a step has run ---

    def advance(self, schedule: Schedule) -> None:
        """Counts the tokens of a step as computed: all blocks are written, or will be before a
        later step reads them. Requests fork whose shared tokens are complete. With overlap, the
        engine calls it when the step is launched; otherwise `update` does."""
        self.block_manager.unwritten.clear()
        for seq, start, num_tokens in schedule.items:
            seq.num_computed_tokens = start + num_tokens
            if not seq.request.has_forked:
                from nanovllm.topics.decoding import groups  # chapter 13

                groups.fork(seq.request, self.block_manager)
        schedule.has_advanced = True

    def update(
        self, schedule: Schedule, token_ids: list[int], logprobs: StepLogprobs = None
    ) -> None:
        """Processes the result of a step: a token for each of `schedule.sampled`, and the
        log-probabilities of the most likely tokens if a request wants them.

        First, computed tokens are counted, and requests fork: see `advance`. Then draft tokens are
        accepted, searches advance, and each row that is left is appended to its sequence.
        """
        if not schedule.has_advanced:
            self.advance(schedule)
        likeliest = logprobs or [None] * len(token_ids)
        rows: NewTokens = zip(schedule.sampled, token_ids, likeliest, strict=True)
        if self.proposer is not None:
            rows = self.proposer.accepted(schedule, self.block_manager, rows)
        # beams want log-probabilities
        if logprobs is not None and any(seq.request.is_search for seq in schedule.sampled):
            from nanovllm.topics.decoding.beam_search import advance_searches  # chapter 13

            rows = advance_searches(rows, self.block_manager, self.running)
        for row in rows:
            self._append(*row)

    def _append(self, seq: Sequence, token_id: int, likeliest: TokenLogprobs | None) -> None:
        """Appends a sampled token to its sequence, and its log-probabilities if the sequence has
        any. If the step in flight computes this token, the block that it fills is cached now. The
        sequence may end with this token: see reason_to_end."""
        if seq.logprobs is not None:
            seq.logprobs.append(likeliest or {})
        seq.token_ids.append(token_id)
        if seq.num_computed_tokens == len(seq.token_ids):  # by the step that is in flight
            self.block_manager.cache_full_blocks(seq, seq.num_computed_tokens)
        reason = self.reason_to_end(seq)
        if reason is not None or len(seq.token_ids) >= seq.request.max_len:
            self.finish(seq, reason or "length")

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends a sequence and frees its blocks. The request ends with its last sequence. A second
        call does no harm."""
        seq.finish_reason = reason
        self.block_manager.free(seq)
        self._free_host(seq)
        request = seq.request
        if request.has_ended:
            queue = self.running if request in self.running else self.waiting
            if request in queue:
                queue.remove(request)

    def _free_host(self, seq: Sequence) -> None:
        """Frees the host blocks of a sequence that was swapped out."""
        if seq.host_table:
            from nanovllm.topics.swapping.blocks import free_host  # chapter 04

            free_host(self.block_manager, seq)

    def abort(self, request: Request) -> None:
        """Ends all unfinished sequences of the request, whether it runs or waits."""
        for seq in request.sequences:
            self.finish(seq, seq.finish_reason or "abort")

    def restart(self, block_manager: BlockManager) -> None:
        """Starts again with empty queues and an empty cache, after a failed step. The requests that
        continue are queued again."""
        self.waiting = []
        self.running = []
        self.block_manager = block_manager

    def unfinished(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    # --- the queue ---

    @property
    def keeps_order(self) -> bool:
        """Whether priorities never change, so `waiting` stays sorted, and no step sorts it
        again."""
        is_default = getattr(self.priority, "__func__", None) is Scheduler.priority
        return is_default or self.priority_is_fixed

    def enqueue(self, request: Request) -> None:
        """Appends the request to `waiting`. With fixed priorities, it is inserted, so that
        `waiting` stays sorted."""

        def key(other: Request) -> tuple:
            return self.priority(other), other.arrival

        if self.keeps_order and self.waiting and key(request) < key(self.waiting[-1]):
            insort(self.waiting, request, key=key)
        else:
            self.waiting.append(request)
