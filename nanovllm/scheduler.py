"""Scheduler: who runs in the next step, and with how many tokens. No torch in here.

There is no prefill and no decode phase. Every sequence has tokens whose keys and values are not in the
cache yet: a new prompt all of them, a decoding sequence one. A step computes as many as the budget and the
blocks allow (iteration-level scheduling as in Orca, with the chunked prefill of Sarathi-Serve).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

from nanovllm.beam_search import Beam
from nanovllm.block_manager import BlockManager
from nanovllm.config import Config, shown
from nanovllm.sequence import Request, Sequence


class ScheduleError(RuntimeError):
    """A scheduler has planned what cannot be run."""


@dataclass
class Schedule:
    """One step: each sequence in it with the number of its tokens to compute, and blocks to move first.

    Swaps go first, out or in (no step has both), then copies: their targets may be blocks that were swapped out.
    """

    items: list[tuple[Sequence, int]] = field(default_factory=list)
    swaps_out: dict[int, int] = field(default_factory=dict)  # block -> host block
    swaps_in: dict[int, int] = field(default_factory=dict)  # host block -> block
    copies: list[tuple[int, int]] = field(default_factory=list)  # copy-on-write: from block, to block

    @property
    def num_tokens(self) -> int:
        return sum(n for _, n in self.items)

    @cached_property
    def sampled_items(self) -> list[tuple[int, Sequence]]:
        """(index of an item, sequence) wherever a last token is computed in this step, so that a next one is drawn. For
        a complete schedule. Before a request forks, the logits of its first sequence are those of all."""
        return [
            (i, member)
            for i, (seq, n) in enumerate(self.items)
            if n == seq.num_missing_tokens
            for member in ([seq] if seq.request.has_forked else seq.request.unfinished)
        ]

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a next token."""
        return [seq for _, seq in self.sampled_items]

    def problem(self, scheduler: "Scheduler", num_moves: int) -> str | None:
        """Why it cannot be run, in a sentence for whoever wrote the scheduler. The block manager asked for `num_moves`."""
        manager, running, draws = scheduler.block_manager, set(scheduler.running), Counter()
        size, seqs, written = manager.block_size, Counter(seq for seq, _ in self.items), set()
        for seq, num_tokens in self.items:
            request, begin, end = seq.request, seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
            if seqs[seq] > 1:
                return f"{seq} is in the schedule twice"
            if request not in running or seq.finish_reason is not None:
                return f"{seq} is in the schedule, but it has ended, or its request is not in scheduler.running"
            if num_tokens < 1 or end > len(seq.token_ids):
                return f"{seq} is to compute {num_tokens} tokens: it misses {seq.num_missing_tokens}"
            if end > len(seq.block_table) * size:
                return f"{seq} is to compute {num_tokens} tokens, but lacks blocks for them: allocate them first"
            block_id = seq.block_table[begin // size]
            if manager.blocks[block_id].ref_count > 1 and block_id not in manager.planned:
                return f"{seq} is to write into block {block_id}, which others read: allocate says what to copy first"
            if request.params.n > 1 and request.has_forked and end == len(seq.token_ids):
                draws[request] += 1
            if manager.planned:
                written.update(seq.block_table[begin // size : end // size])
        for request, drawn in draws.items():
            if drawn < (total := len(request.unfinished)):
                return f"{drawn} of {total} sequences of {request.request_id} would get a token: it must be all or none"
        for total, limit in ((self.num_tokens, "max_num_batched_tokens"), (len(seqs), "max_num_seqs")):
            if total > getattr(scheduler, limit):
                return f"the schedule has {total} {limit.split('_')[-1]}, but {limit}={getattr(scheduler, limit)}"
        if not manager.planned <= written:
            return (
                f"nobody computes blocks {manager.planned - written}, which can be found: what _commit plans must stay"
            )
        listed = len(self.copies) + len(self.swaps_out) + len(self.swaps_in)
        if listed != num_moves:
            asked = (
                f"the block manager asked for {num_moves}: all that it asks for belongs into the schedule of the step"
            )
            return f"the schedule lists {listed} blocks to copy and swap, but {asked}"
        return None


def common_length(sequences: list[list[int]]) -> int:
    """How many tokens all of them, which are equally long, begin with."""
    columns = enumerate(zip(*sequences))
    return next((i for i, column in columns if len(set(column)) > 1), len(sequences[0]))


class Scheduler:
    """First come, first served, under a budget of tokens and sequences (paper, section 4.5).

    To change the order, override `priority`. To change more, override `schedule`, which may use everything here.
    """

    def __init__(self, config: Config, block_manager: BlockManager):
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_seqs = config.max_num_seqs
        self.max_model_len = config.max_model_len
        self.block_manager = block_manager
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_swapped_blocks = 0  # that went to the host
        self.num_prompt_tokens = 0  # of requests when they were first admitted ...
        self.num_cached_tokens = 0  # ... and how many of them the prefix cache had

    def priority(self, request: Request):
        """Sort key: the request with the smallest runs first, the one with the largest is preempted first."""
        return request.arrival

    def check(self, request: Request) -> None:
        """Raises ValueError if the request could not run to its end even if it had the whole cache."""
        prompt, params = len(request.prompt_token_ids), request.params
        name_of_n = "n" if request.beam_search is None else "beam_width"
        if prompt + 1 > self.max_model_len:
            raise ValueError(
                f"the prompt has {prompt} tokens, but max_model_len={self.max_model_len} leaves room for at most "
                f"{self.max_model_len - 1} and one new token"
            )
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if params.n > getattr(self, name):
                limit = getattr(self, name)
                raise ValueError(f"{name_of_n}={shown(params.n)} is not allowed: it must be at most {name}={limit}")
        blocks, total = self.block_manager.most_blocks(request, self.longest(request)), len(self.block_manager.blocks)
        if blocks > total:
            raise ValueError(
                f"the request may need {blocks} KV blocks of {self.block_manager.block_size} tokens (prompt of {prompt} "
                f"tokens, max_tokens={params.max_tokens}, {name_of_n}={params.n}), but num_blocks={total}"
            )

    def longest(self, request: Request) -> int:
        """The most tokens that each of its sequences may have in the cache. The last one is never fed back."""
        return min(len(request.prompt_token_ids) + request.params.max_tokens, self.max_model_len) - 1

    def add(self, request: Request) -> None:
        self.check(request)
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """Plans a step: running requests first, then waiting ones. What it plans has its blocks."""
        schedule = Schedule()
        budget = self._schedule_running(schedule, self.max_num_batched_tokens)
        if budget is not None:
            self._schedule_waiting(schedule, budget)
        self.num_swapped_blocks += len(schedule.swaps_out)
        return schedule

    def _schedule_running(self, schedule: Schedule, budget: int) -> int | None:
        """Returns the budget that is left, or None if a request was preempted, so that none is admitted."""
        self.running.sort(key=self.priority)
        num_preemptions, i = self.num_preemptions, 0
        while i < len(self.running) and budget > 0:
            plan = self._plan(self.running[i], budget)
            while not self.block_manager.can_allocate(plan) and i < len(self.running):
                self._preempt(self.running.pop(), schedule)
            if i < len(self.running):  # else it was the last one and had to give way itself
                budget -= self._commit(plan, schedule)
                i += 1
        return budget if self.num_preemptions == num_preemptions else None

    def _schedule_waiting(self, schedule: Schedule, budget: int) -> None:
        if not self.waiting:
            return
        num_seqs = sum(request.num_seats for request in self.running)
        if num_seqs < self.max_num_seqs:
            self.waiting.sort(key=self.priority)
        reserved = sum(self.block_manager.num_blocks_at_fork(request) for request in self.running)
        while self.waiting and budget > 0:
            request = self.waiting[0]
            num_seqs += request.num_seats
            if num_seqs > self.max_num_seqs or not self.block_manager.can_admit(request, reserved):
                break
            self._admit(request, schedule)
            budget -= self._commit(self._plan(request, budget), schedule)
            reserved += self.block_manager.num_blocks_at_fork(request)

    def _admit(self, request: Request, schedule: Schedule) -> None:
        """Gives it blocks for all tokens that it has, chunked or not: else it would soon be preempted in mid-prompt. What
        the cache still has of them, and what the host has, need not be computed."""
        self.waiting.remove(request)
        self.running.append(request)
        self._take_cached(request, schedule.swaps_in)
        self._count_hits(request)
        for seq in request.unfinished:
            self.block_manager.free_host(seq)
        for seq in request.running:
            schedule.copies += self.block_manager.allocate(seq, seq.num_missing_tokens)

    def _plan(self, request: Request, budget: int) -> list[tuple[Sequence, int]]:
        """The request's sequences with their missing tokens, as far as the budget goes.

        Several sequences of a request get their next tokens together or not at all: the last token of each is
        computed in the same step.
        """
        seqs = request.unfinished
        if len(seqs) == 1:
            return [(seqs[0], min(seqs[0].num_missing_tokens, budget))]
        if not request.has_forked:
            return [(seqs[0], min(request.num_shared_tokens - seqs[0].num_computed_tokens, budget))]
        missing = [seq.num_missing_tokens for seq in seqs]
        if max(missing) == 1:
            return [(seq, 1) for seq in seqs] if len(seqs) <= budget else []
        plan = []
        for seq, num_tokens in zip(seqs, missing):
            num_tokens = min(num_tokens - 1, budget)
            if num_tokens > 0:
                plan.append((seq, num_tokens))
                budget -= num_tokens
        return plan

    def _take_cached(self, request: Request, swaps_in: dict[int, int]) -> None:
        request.num_shared_tokens = common_length([seq.token_ids for seq in request.unfinished])
        self.block_manager.take_prefix(request.running[0], swaps_in)
        self._fork(request, swaps_in)

    def _fork(self, request: Request, swaps_in: dict[int, int] | None = None) -> None:
        """Once the first sequence has computed what all have in common, the others share it and go their own ways."""
        if request.has_forked or request.running[0].num_computed_tokens < request.num_shared_tokens:
            return
        first, *others = request.unfinished
        for seq in others:
            if len(seq) > request.num_shared_tokens:  # it was preempted: its own blocks may still be there
                size = self.block_manager.block_size
                self.block_manager.fork(first, seq, request.num_shared_tokens // size * size)
                is_enough = seq.num_host_tokens >= request.num_shared_tokens
                self.block_manager.take_prefix(seq, swaps_in if is_enough else None)
            if seq.num_computed_tokens < request.num_shared_tokens:
                self.block_manager.free(seq)
                self.block_manager.fork(first, seq, request.num_shared_tokens)
        request.has_forked = True

    def _commit(self, plan: list[tuple[Sequence, int]], schedule: Schedule) -> int:
        """Gives each sequence of the plan its blocks, and puts it into the schedule."""
        for seq, num_tokens in plan:
            schedule.copies += self.block_manager.allocate(seq, num_tokens)
            self.block_manager.publish(seq, seq.num_computed_tokens + num_tokens)
        schedule.items += plan
        return sum(num_tokens for _, num_tokens in plan)

    def _preempt(self, request: Request, schedule: Schedule) -> None:
        """All or nothing: all sequences of the request lose their blocks and wait. The host keeps what they had, if it
        has room; else it is computed again."""
        self.block_manager.swap_out(request.running, schedule.swaps_out)
        self._release(request)
        self.waiting.append(request)
        self.num_preemptions += 1

    def restart(self, requests: Iterable[Request], block_manager: BlockManager) -> None:
        """Begins anew with these requests and an empty cache, after a step of which nobody knows what it has done."""
        self.waiting, self.running, self.block_manager = list(requests), [], block_manager
        for request in self.waiting:
            request.has_forked = False
            for seq in request.sequences:
                seq.restart()

    def _release(self, request: Request) -> None:
        for seq in request.unfinished:
            self.block_manager.free(seq)
        request.has_forked = False

    def _count_hits(self, request: Request) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.sequences[0].num_computed_tokens
            self.num_cached_tokens += request.num_cached_tokens
            self.num_prompt_tokens += len(request.prompt_token_ids)

    def update(
        self, schedule: Schedule, token_ids: list[int], logprobs: list[dict[int, float] | None] | None = None
    ) -> list[Sequence]:
        """Takes in a step's result: one token for each of `schedule.sampled`, which it returns."""
        sampled, beams = schedule.sampled, {}
        self.block_manager.planned.clear()  # they are written
        for seq, num_tokens in schedule.items:
            seq.num_computed_tokens += num_tokens
            self._fork(seq.request)
        for i, (seq, token_id) in enumerate(zip(sampled, token_ids, strict=True)):
            if seq.request.beam_search is not None:
                beams.setdefault(seq.request, []).append((seq, logprobs[i]))
                continue
            if seq.logprobs is not None:
                seq.logprobs.append(logprobs[i])
            seq.token_ids.append(token_id)
            reason = self.reason_to_end(seq)
            if reason is not None:
                self.finish(seq, reason)
        for request, rows in beams.items():
            self._advance_beams(request, rows)
        return sampled

    def reason_to_end(self, seq: Sequence) -> str | None:
        """Why no token comes after its last one. Stop strings are the engine's matter."""
        num_tokens, request = len(seq.token_ids), seq.request
        num_output_tokens = num_tokens - len(request.prompt_token_ids)
        if num_output_tokens and seq.token_ids[-1] in request.stop_token_ids:
            return "stop"
        is_full = num_output_tokens >= request.params.max_tokens or num_tokens >= self.max_model_len
        return "length" if is_full else None

    def _advance_beams(self, request: Request, rows: list[tuple[Sequence, dict[int, float]]]) -> None:
        """A step of beam search is fork and free: every beam that goes on forks from its parent, and all parents go."""
        parents = [seq for seq, _ in rows]
        if parents[0].num_output_tokens == 0:
            rows = rows[:1]  # after the prompt all are the same
        candidates = [
            Beam(seq, token_id, seq.cumulative_logprob + logprob)
            for seq, likeliest in rows
            for token_id, logprob in likeliest.items()
        ]
        search, children = copy(request.beam_search), []
        for beam in search.advance(candidates):
            child = Sequence(request, len(children))
            child.token_ids = [*beam.parent.token_ids, beam.token_id]
            child.cumulative_logprob = beam.cumulative_logprob
            self.block_manager.fork(beam.parent, child)
            children.append(child)
        for seq in parents:
            self.block_manager.free(seq)
        request.sequences, request.beam_search = children, search  # both or neither, should a Ctrl-C come
        if not children:
            self.running.remove(request)

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends one sequence, and its request with the last one."""
        seq.finish_reason = reason
        self.block_manager.free(seq)
        self.block_manager.free_host(seq)
        for queue in (self.running, self.waiting):
            if seq.request.is_finished and seq.request in queue:
                queue.remove(seq.request)

    def abort(self, request: Request) -> None:
        """Ends what is unfinished of the request, wherever it is."""
        for seq in request.sequences:
            self.finish(seq, seq.finish_reason or "abort")

    def unfinished(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)
