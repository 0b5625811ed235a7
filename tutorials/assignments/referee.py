"""The side of the grader that is believed: it asks a student's process for decisions, checks and
carries them out.

A `Referee` is a scheduler like any other, so `simulate` runs it. What it is told to do, it does
with the base class's own methods, its own block tables and its own limits. Whatever a process
claims, it can only choose among what is allowed. A `RouterReferee` is a router in the same way."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from nanovllm.options import is_int, shown
from nanovllm.schedule import Item, Schedule, ScheduleError, check_choice
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.topics.checks.schedules import check_schedule
from nanovllm.topics.decoding.drafts import Draft
from nanovllm.topics.routing.router import Loads, Router
from tutorials.assignments.player import name_of
from tutorials.assignments.problems import Broken, Kind
from tutorials.assignments.process import Process
from tutorials.assignments.task import Part

SECONDS_PER_STEP = 0.01  # of the real engine, by the clock that the policy sees


class Referee(Scheduler):
    """Carries out what a student's process decides, if it is allowed."""

    process: Process  # set by `referee_for`, as are these:
    block_manager_name: str | None
    counts: tuple[str, ...]  # what the student's block manager must count as ours does
    max_steps: int
    speculative_config: dict[str, Any] | None

    def __init__(self, limits, block_manager):
        super().__init__(limits, block_manager)
        self.limits = limits
        # what the process has not been told yet
        self.arrived = list[list]()
        self.tokens = dict[str, list[int]]()  # by sequence, as is this: guesses, right or wrong
        self.num_drafted = dict[str, int]()
        self.wanted: Iterator[object] = iter(())  # guesses, of the sequences in turn
        self.requests = dict[str, Request]()  # unfinished
        self.num_steps, self.is_swapped = 0, False
        sizes = len(block_manager.blocks), block_manager.block_size
        blocks = [*sizes, block_manager.enable_prefix_caching, len(block_manager.host_ref_counts)]
        start = {
            "scheduler": type(self).__name__,
            "block_manager": self.block_manager_name,
            "counts": self.counts,
            "limits": vars(limits),
            "blocks": blocks,
            "draft_tokens": self.speculative_config,
        }
        self.process.ask(start)

    def add(self, request: Request) -> None:
        super().add(request)
        self.requests[request.request_id] = request
        self.arrived.append(packed(request))

    def schedule(self) -> Schedule:
        """Raises ScheduleError for a rule that is broken, and Broken for a process that fails."""
        ended = [
            request_id for request_id, request in self.requests.items() if not request.unfinished
        ]
        for request_id in ended:
            del self.requests[request_id]
        news = {
            "now": self.clock(),
            "tokens": self.tokens,
            "guessed": self.num_drafted,
            "ended": ended,
            "arrived": self.arrived,
        }
        self.arrived, self.tokens, self.num_drafted, schedule = [], {}, {}, Schedule()
        self.num_steps += 1
        if self.num_steps > self.max_steps:
            sentence = f"{len(self.requests)} requests are still waiting for tokens"
            raise self._broken(Kind.STILL_WAITING, sentence)
        answer = ask(self.process, news, f"step {self.num_steps}")
        try:
            for event in answer["events"]:
                self._carry_out(schedule, *event)
            self._compare_counts(answer["counts"])
            if self.proposer is not None:
                self._add_drafts(schedule, answer["draft_tokens"], answer["tokens_left"])
        except (TypeError, KeyError, ValueError) as error:
            raise self._broken(Kind.NO_DECISION, f"{Kind.NO_DECISION.value}: {error}") from error
        schedule.moves = self.block_manager.take_moves()
        schedule.num_used_blocks = self.block_manager.num_used_blocks
        self.num_swapped_blocks += len(schedule.moves.swaps_out)
        check_schedule(schedule, self, self.limits)
        return schedule

    def _broken(self, kind: Kind, sentence: str) -> Broken:
        return Broken(kind, f"step {self.num_steps}: {sentence}")

    def _compare_counts(self, counts: list) -> None:
        for name, count in zip(self.counts, counts, strict=True):
            expected = getattr(self.block_manager, name)
            if count != expected:
                wrong = f"{self.block_manager_name}.{name} is {shown(count)}, not {expected}"
                raise ScheduleError(self, "schedule", wrong)

    def _carry_out(
        self, schedule: Schedule, kind: str, request_id: str, value: object = None, index: int = 0
    ) -> None:
        request = self.requests[request_id]
        if kind == "preempt":
            self.is_swapped = value is True
            self.preempt(request)
        elif kind == "admit":
            check_choice(self, "admit", request, self.waiting)
            self._require_room(self.block_manager.can_admit(request), request, "admitted")
            self.admit(request)
        elif kind == "compute":
            check_choice(self, "commit", request, self.running)
            self._compute(schedule, request, value, index)
        else:
            raise ValueError(shown(kind))

    def _compute(
        self, schedule: Schedule, request: Request, num_tokens: object, index: int
    ) -> None:
        # before its sequences fork, the first one computes what all of them share
        seqs = {seq.index: seq for seq in request.unfinished[: None if request.has_forked else 1]}
        seq = seqs[index]
        end = len(seq) if request.has_forked else request.num_shared_tokens
        num_missing = end - seq.num_computed_tokens
        if not is_int(num_tokens, 1, num_missing):
            problem = f"is to compute {num_tokens} tokens, but {num_missing} are missing"
            raise ScheduleError(self, "commit", f"{request} {problem}")
        items = [Item(seq, seq.num_computed_tokens, num_tokens)]
        self._require_room(self.block_manager.can_allocate(items), request, "given tokens")
        self.commit(items, schedule)

    def _require_room(self, has_room: bool, request: Request, what: str) -> None:
        if not has_room:
            num_free = self.block_manager.num_free_blocks
            raise ScheduleError(
                self,
                "schedule",
                f"{request} is {what}, but needs more than the {num_free} free blocks",
            )

    def _add_drafts(self, schedule: Schedule, wanted: list, tokens_left: object) -> None:
        if not is_int(tokens_left, 0):
            raise ValueError(shown(tokens_left))
        most = self.limits.max_num_batched_tokens - schedule.num_tokens
        schedule.tokens_left = min(tokens_left, most)
        self.wanted = iter(wanted)
        wanted_of = self.num_draft_tokens
        self.proposer.add_drafts(schedule, self.running, self.block_manager, wanted_of)

    def num_draft_tokens(self, request: Request) -> object:
        return next(self.wanted, None)

    def update(self, schedule: Schedule, token_ids: list[int], logprobs=None) -> None:
        drawn = dict(zip(schedule.sampled, token_ids))
        for row, _, _ in schedule.items:
            if isinstance(row, Draft):
                self.num_drafted[name_of(row)] = row.place
        super().update(schedule, token_ids, logprobs)
        for row in schedule.sampled:  # of guesses, only the right ones are left
            self.tokens.setdefault(name_of(row), []).append(drawn[row])

    def should_swap(self, request: Request) -> bool:
        return self.is_swapped


class EngineReferee(Referee):
    """The same in the real engine, with the model in this process: what it answers is not in the
    hands of the file. Its clock counts steps, so a run is the same on every machine."""

    def __init__(self, limits, block_manager):
        super().__init__(limits, block_manager)
        self.clock = lambda: self.num_steps * SECONDS_PER_STEP

    def schedule(self) -> Schedule:
        """Raises ScheduleError, with the Broken as its cause: after any other exception, the
        engine would go on without the request that may be to blame."""
        try:
            return super().schedule()
        except Broken as error:
            raise ScheduleError(self, "schedule", str(error)) from error


class RouterReferee(Router):
    """Sends each request where a student's process says, if there is such a replica. The replicas
    have schedulers of ours, so nothing else can go wrong."""

    process: Process  # set by `new_referee`

    def __init__(self, block_size: int, num_blocks: int):
        super().__init__(block_size, num_blocks)
        self.process.ask({"router": type(self).__name__, "blocks": [block_size, num_blocks]})

    def choose(self, request: Request, loads: Loads) -> int:
        """Raises Broken for a process that fails, or that has chosen no replica."""
        where = f"request {request.request_id}"
        question = {"request": packed(request), "loads": [*loads.items()]}
        choice = ask(self.process, question, where).get("replica")
        if not is_int(choice, 0) or choice not in loads:
            sentence = f"{where}: your process has chosen what is no replica: {shown(choice)}"
            raise Broken(Kind.NO_DECISION, sentence)
        return choice


def packed(request: Request) -> list[Any]:
    """What a process is told of it, for JSON. The player makes a request of it again."""
    runs = [[token, len(list(group))] for token, group in groupby(request.prompt_token_ids)]
    params = {
        "n": request.params.n,
        "max_tokens": request.params.max_tokens,
        "stop_token_ids": [*request.stop_token_ids],
        "extra_args": request.params.extra_args,
    }
    return [request.request_id, request.arrival, request.arrival_time, runs, params]


def ask(process: Process, question: dict[str, Any], where: str) -> dict[str, Any]:
    """Its answer. If it fails, the sentence says where."""
    try:
        return process.ask(question)
    except Broken as error:
        error.args = (f"{where}: {error}",)
        raise


def new_referee(process: Process, part: Part, max_steps: int) -> type:
    """A class for `simulate`: a scheduler or a router, as the part asks for."""
    if part.router is not None:
        return type(part.router, (RouterReferee,), {"process": process})
    return referee_for(process, part, max_steps)


def referee_for(
    process: Process, part: Part, max_steps: int, base: type[Referee] = Referee
) -> type[Referee]:
    """A class for `simulate`. It has the name of the student's class, which stands in the
    messages."""
    fields = {
        "process": process,
        "block_manager_name": part.block_manager,
        "counts": part.counts,
        "max_steps": max_steps,
        "speculative_config": part.config.speculative_config,
    }
    return type(part.scheduler, (base,), fields)
