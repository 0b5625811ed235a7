"""The process in which a student's scheduler or router runs while it is graded. Nothing that it
says is believed.

For a scheduler it gets one JSON line per step: what arrived, which tokens were drawn, what time it
is. It answers with one line: what has been decided. For a router it gets a line per request, and
answers with a replica. The clock, the true lengths, the cost of a step and the verdict are in the
process that grades (`referee.py`). The checks here are those of `simulate(..., check=True)`: they
are for those who made a mistake."""

import faulthandler
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import ModuleType
from typing import Any

from nanovllm import Router
from nanovllm.block_manager import BlockManager, Moves
from nanovllm.config import Limits
from nanovllm.options import is_int
from nanovllm.sampling_params import LARGEST_COUNT, SamplingParams
from nanovllm.schedule import Schedule, ScheduleError, check_choice
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request, Sequence
from nanovllm.topics.checks.schedules import ScheduleChecks, check_queues
from nanovllm.topics.decoding.drafts import Draft, Proposer, config_of, without_draft
from nanovllm.topics.simulator.answers import WRONG
from nanovllm.topics.simulator.jobs import STOP

try:
    import resource
except ModuleNotFoundError:
    raise SystemExit("the grader needs Linux or macOS: on Windows, run it in WSL") from None

LONGEST = 2000  # characters of an error
LONGEST_PRINTED = 2**18


class Logged:
    """Mixed into the student's class: notes each decision, in the order in which blocks change
    hands."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.events: list[list] = []
        self.is_swapped = False
        self.wanted: list[int] = []  # guesses, of the sequences in turn
        self.is_told = False  # what was guessed

    def should_swap(self, request):
        self.is_swapped = super().should_swap(request)
        return self.is_swapped

    def preempt(self, request):
        self.is_swapped = False
        super().preempt(request)
        self.events.append(["preempt", request.request_id, bool(self.is_swapped)])

    def admit(self, request):
        super().admit(request)
        self.events.append(["admit", request.request_id])

    def commit(self, items, schedule):
        super().commit(items, schedule)
        self.events += [
            ["compute", seq.request.request_id, num_tokens, seq.index]
            for seq, _, num_tokens in items
        ]

    def num_draft_tokens(self, request):
        if self.is_told:
            return LARGEST_COUNT
        wanted = super().num_draft_tokens(request)
        if is_int(wanted, 0):
            self.wanted.append(int(wanted))
        return wanted


class ToldProposer(Proposer):
    """Guesses nothing while a step is planned. Once it has run, the referee says what was guessed."""

    def __init__(self, config):
        super().__init__(config)
        self.told: dict[str, list[int]] = {}  # by sequence

    def propose(self, seq, most):
        return self.told.get(name_of(seq), [])


class Printed(io.TextIOWrapper):
    """What the student prints. Of much of it, the last part is kept."""

    def write(self, text: str) -> int:
        if os.fstat(self.fileno()).st_size > LONGEST_PRINTED:
            self.flush()
            os.ftruncate(self.fileno(), 0)
            os.lseek(self.fileno(), 0, os.SEEK_SET)
        super().write(text[-LONGEST_PRINTED:])
        return len(text)


class Player:
    """Plays one simulation: has the student's scheduler, its own blocks, and requests without their
    true lengths."""

    def __init__(self, module: ModuleType, start: dict[str, Any]):
        scheduler_cls = find_class(module, start["scheduler"], Scheduler)
        manager_cls = find_class(module, start["block_manager"] or "BlockManager", BlockManager)
        logged = type(scheduler_cls.__name__, (Logged, scheduler_cls), {})
        self.manager = manager_cls(*start["blocks"])
        self.counts = start["counts"]
        limits = Limits(**start["limits"])
        self.scheduler = logged(limits, self.manager)
        self.scheduler.clock = lambda: self.now
        if start["draft_tokens"] is not None:
            self.scheduler.proposer = ToldProposer(config_of(start["draft_tokens"]))
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.checks = ScheduleChecks(self.scheduler, limits, self.requests)
        self.schedule: Schedule | None = None

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        scheduler, self.now = self.scheduler, message["now"]
        if self.schedule is not None:
            self._update(self.schedule, message["tokens"], message["guessed"])
        for request_id in message["ended"]:
            request = self.requests.pop(request_id)
            if request.unfinished:
                raise ScheduleError(
                    scheduler, "update", f"{request} has drawn its last token, but has not ended"
                )
        for seq, *_ in self.schedule.items if self.schedule else ():
            seq = without_draft(seq)
            if seq.request.has_ended and seq.request.request_id in self.requests:
                early = f"it has ended {seq.request} at output token {seq.num_output_tokens}"
                raise ScheduleError(scheduler, "update", f"{early}, but the answer goes on")
        for packed in message["arrived"]:
            request = unpacked(*packed)
            scheduler.add(request)
            self.requests[request.request_id] = request
        scheduler.events, scheduler.wanted = [], []
        self.schedule = self.checks.schedule()
        check_queues(scheduler, scheduler.unfinished(), self.requests.values())
        counts = [getattr(self.manager, name, None) for name in self.counts]
        return {
            "events": scheduler.events,
            "counts": counts,
            "draft_tokens": scheduler.wanted,
            "tokens_left": max(0, self.schedule.tokens_left),
        }

    def _update(
        self, schedule: Schedule, tokens: dict[str, list[int]], num_drafted: dict[str, int]
    ) -> None:
        """The step has run: of each sequence the tokens that it got, and how many were guessed."""
        if num_drafted:
            self._add_drafts(schedule, tokens, num_drafted)
        drawn = []
        for row in schedule.sampled:
            place = row.place if isinstance(row, Draft) else 0
            drawn.append(tokens.get(name_of(row), [])[place : place + 1] or [STOP])
        self.checks.update(schedule, [token for (token,) in drawn])

    def _add_drafts(
        self, schedule: Schedule, tokens: dict[str, list[int]], num_drafted: dict[str, int]
    ) -> None:
        """Makes the rows that the referee has: right guesses, then wrong ones."""
        scheduler = self.scheduler
        proposer = scheduler.proposer
        for name, count in num_drafted.items():
            right = tokens[name][:-1]
            proposer.told[name] = right + [WRONG] * (count - len(right))
        scheduler.is_told = True
        wanted = scheduler.num_draft_tokens
        proposer.add_drafts(schedule, scheduler.running, scheduler.block_manager, wanted)
        scheduler.is_told = False
        proposer.told = {}
        drafted = [item for item in schedule.items if isinstance(item.seq, Draft)]
        self.checks.contents.go_on(drafted, Moves())


class RouterPlayer:
    """Has the student's router, and no replicas: it is told how many requests each of them has."""

    def __init__(self, module: ModuleType, start: dict[str, Any]):
        router_cls = find_class(module, start["router"], Router)
        self.router = router_cls(*start["blocks"])

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        loads = dict(message["loads"])
        replicas = [*loads]
        choice = self.router.choose(unpacked(*message["request"]), loads)
        check_choice(self.router, "choose", choice, replicas)
        return {"replica": choice}


def unpacked(
    request_id: str, arrival: int, time: float, prompt: list, params: dict[str, Any]
) -> Request:
    """What `packed` in referee.py has made a list of."""
    token_ids = [token for token, count in prompt for _ in range(count)]
    params = SamplingParams(**params)
    return Request(request_id, None, token_ids, params, arrival=arrival, arrival_time=time)


def name_of(seq: Sequence) -> str:
    """The same here and in referee.py."""
    return f"{seq.request.request_id}.{seq.index}"


def find_class(module: ModuleType, name: str, base: type) -> type:
    cls = getattr(module, name, base if name == base.__name__ else None)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"your file has no class {name} that is a subclass of {base.__name__}")
    return cls


def load(source: str, name: str) -> ModuleType:
    """The student's file as a module."""
    module = ModuleType("solution")
    module.__file__ = name
    sys.modules["solution"] = module
    exec(compile(source, name, "exec"), vars(module))
    return module


def plain(value: Any) -> Any:
    """As JSON has it; what it cannot hold is a dict, which is no answer to anything."""
    text = json.dumps(value, skipkeys=True, default=lambda other: {"type": type(other).__name__})
    return json.loads(text)


def explained(error: BaseException, name: str) -> dict[str, Any]:
    """What is wrong, and where in the student's file; or, if the error is about what a method of
    it has returned, where in the scheduler."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == name]
    ours = [frame for frame in frames if frame.filename.endswith("scheduler.py")]
    where = ""
    if own:
        where = f" (line {own[-1].lineno} of your file, in {own[-1].name})"
    elif ours:
        where = f" (in {ours[-1].name} of scheduler.py: {ours[-1].line})"
    text = str(error)[:LONGEST]
    if isinstance(error, ScheduleError):
        return {"error": text, "is_rule": True}
    return {"error": f"{type(error).__name__}: {text}{where}"}


def serve(ask: Callable[[], str], reply: Callable[[dict], None]) -> None:
    """Loads the file; then plays its part."""
    start = read(ask())
    name, player = start["name"], None
    try:
        module = load(start["source"], name)
        reply({"constants": {key: plain(getattr(module, key, None)) for key in start["constants"]}})
        while line := ask():
            message = read(line)
            if player is None:
                player_cls = RouterPlayer if "router" in message else Player
                player = player_cls(module, message)
                reply({})
            else:
                reply(player.step(message))
    except BaseException as error:  # also SystemExit
        reply(explained(error, name))


def read(line: str) -> dict[str, Any]:
    """A question. If the answer takes too long, an alarm prints where the file is then."""
    message = json.loads(line)
    signal.setitimer(signal.ITIMER_REAL, message["patience"])
    return message


def set_limits(megabytes: int, seconds: int) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, megabytes * 2**20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 2**20),  # what it prints is a file, too
        (resource.RLIMIT_CORE, 0),
    ):
        # macOS refuses a limit of the address space
        with suppress(ValueError) if sys.platform == "darwin" else nullcontext():
            resource.setrlimit(limit, (value, value))


def main() -> None:
    """Talks over what were standard input and output; what the student prints goes to standard
    error."""
    questions, answers = (
        os.fdopen(os.dup(0), "r", encoding="utf-8"),
        os.fdopen(os.dup(1), "w", encoding="utf-8"),
    )
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for name in ("stdout", "stderr"):
        file = os.fdopen(os.dup(2), "wb")
        setattr(sys, name, Printed(file, errors="backslashreplace", line_buffering=True))
    faulthandler.register(signal.SIGALRM, file=2)
    set_limits(*map(int, sys.argv[1:]))

    def reply(message: dict) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    serve(questions.readline, reply)
