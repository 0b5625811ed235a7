"""A scheduler or a block manager of a user that is wrong is named in a sentence that says what is wrong, the engine goes
on, and no request gets a wrong token.

What a policy may decide is in test_policy.py, hooks that raise are in test_misuse.py.

Run: pytest tests/core/test_foreign_schedulers.py [-k preempt]
"""

import re
from functools import cache
from operator import attrgetter

import numpy as np
import pytest
from fake_engine import answer, check_clean, new_llm, result

from nanovllm import SamplingParams
from nanovllm.block_manager import BlockManager, Moves
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.scheduler import Scheduler

# --- what one plan shows ---


def planned(change):
    """A `schedule` that plans as ours does, and then does this with the plan."""

    def schedule(self):
        schedule = Scheduler.schedule(self)
        return change(self, schedule) or schedule

    return {"schedule": schedule}


def adds_only(self, items, schedule):
    """It allocates and copies no blocks."""
    for item in items:
        schedule.add(item)


def half_of_the_samples(self, items, schedule):
    few = [item for item in items if item.seq.index < 2 or not schedule.items]
    Scheduler.commit(self, few, schedule)


def forgets_the_last_that_waits(self):
    if self.waiting and not self.running:
        self.waiting.pop()
    return Scheduler.schedule(self)


def replace_item(i, **fields):
    def change(self, schedule):
        item = schedule.items[i]
        schedule.items[i] = item._replace(**{name: value(item) for name, value in fields.items()})

    return planned(change)


WRONG = {  # methods of a scheduler, what is said of it, and the number of samples
    "plans nothing": ({"schedule": lambda self: Schedule()}, r"Wrong.schedule\(\): the step has planned nothing, but there are unfinished requests: \['0', '1'\]", 1),
    "returns nothing": ({"schedule": lambda self: None}, r"Wrong.schedule\(\): it returned None, and not a Schedule", 1),
    "loses a request": ({"schedule": forgets_the_last_that_waits}, r"there are unfinished requests: \['1'\]; neither waiting nor running: \['1'\]", 1),
    "plans an item twice": (planned(lambda self, plan: plan.items.append(plan.items[0])), r"Sequence\(0.0: .*\) is in the schedule twice", 1),
    "spends too much": ({"step_budget": lambda self: (10**6, 10**6)}, "the schedule has 80 tokens, but max_num_batched_tokens=40", 1),
    "allocates no blocks": ({"commit": adds_only}, "lacks blocks for 1 tokens: allocate them first", 1),
    "ends what runs": (planned(lambda self, plan: self.running.clear()), "is in the schedule, but it has ended, or its request is not in scheduler.running", 1),
    "computes too many tokens": (replace_item(-1, num_tokens=lambda item: item.num_tokens + 1), "is to compute 41 tokens, but 40 are missing", 1),
    "starts at another token": (replace_item(0, start=lambda _: 1, num_tokens=lambda _: 1), "is to compute tokens from 1 on, but that is not the next one", 1),
    "spends one number": ({"step_budget": lambda self: 7}, r"Wrong.step_budget\(\): it returned 7, and not two integers", 1),
    "spends halves": ({"step_budget": lambda self: (10.5, 3.2)}, r"it returned \(10.5, 3.2\), and not two integers", 1),
    "forgets a return": ({"may_admit": lambda *_: None}, r"may_admit\(\): it returned None, and not True or False: is a `return` missing", 1),
    "has no order": ({"running_order": lambda *_: None}, r"running_order\(\): it returned None, and not a sort key", 1),
    "has NaN in its order": ({"running_order": lambda *_: (0, float("nan"))}, r"running_order\(\): it returned \(0, nan\)", 1),
    "computes half a token": (replace_item(0, num_tokens=lambda item: item.num_tokens / 2), r"is to compute \d+.0 tokens", 1),
    "copies nothing": ({"commit": adds_only}, r"is to write into block \d+, which others read", 3),
    "samples only some": ({"commit": half_of_the_samples}, "2 of 3 sequences of 1 would get a token: it must be all or none", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_scheduler_that_is_half_right_is_told_so(name):
    methods, message, n = WRONG[name]
    llm = new_llm(scheduler_cls=type("Wrong", (Scheduler,), methods))
    prompts = [[1] * (38 if n == 3 else 40), [2] * 40]
    with pytest.raises(ScheduleError, match=message):
        llm.generate(prompts, SamplingParams(n=n, max_tokens=5, seed=1), use_tqdm=False)
    check_clean(llm)
    (request_id,) = [llm.add_request([3])]
    if name in ("plans nothing", "returns nothing", "ends what runs"):
        for _ in range(3):  # again and again, and it can be ended
            with pytest.raises(ScheduleError):
                llm.step()
    assert llm.abort(request_id)
    llm.step()
    check_clean(llm)


def one_prompt(self, schedule):
    prompts = [item for item in schedule.items if item.num_tokens > 1]
    schedule.items = [item for item in schedule.items if item not in prompts[1:]]


def small_chunks(self, schedule):
    chunks = [item._replace(num_tokens=min(item.num_tokens, 5)) for item in schedule.items]
    schedule.items = chunks


def preempts_what_it_has_planned(self, schedule):
    if len(self.running) > 2:
        victim = self.running[1]
        self.preempt(victim)
        schedule.items = [item for item in schedule.items if item.seq.request is not victim]


# --- what many steps show ---


def preempts_all(self, schedule):
    for request in [*self.running]:
        self.preempt(request)


def test_a_livelock_ends_with_a_sentence():
    """Each step computes something, and throws away what the one before has computed."""
    wrong = type("Wrong", (Scheduler,), {"make_room": preempts_all})
    llm = new_llm(scheduler_cls=wrong, enable_prefix_caching=False)
    with pytest.raises(ScheduleError, match=r"Wrong.schedule\(\): 101 steps without a new token"):
        llm.generate([[1] * 60, [2] * 60], SamplingParams(max_tokens=3), use_tqdm=False)
    check_clean(llm)


# --- what a block holds ---


# --- what is right, but unusual ---


def test_running_out_of_blocks_has_a_message(caplog):
    cls = type("NoBlockFree", (BlockManager,), {"can_admit": lambda *_: True})
    llm = new_llm(block_manager_cls=cls, num_blocks=12)
    prompts = [[1] * 30, [2] * 30, [3] * 30]
    llm.generate(prompts, SamplingParams(seed=1, max_tokens=5), use_tqdm=False)
    failures = [line for line in caplog.messages if line.startswith("a step failed")]
    assert failures and all("no free block" in line for line in failures)


# --- each method, right and wrong: in a step with samples, swaps, shared prefixes, and too few blocks ---

STEM = [7, 8, 9, 10] * 3
PROMPTS = {
    "a": [*STEM, 1],
    "b": [5] * 9,
    "c": [*STEM, 1, 2, 3],
    "d": [11, 12] * 7,
    "e": [42] * 20,
    "f": STEM,
}
PARAMS = {name: SamplingParams(seed=i, max_tokens=20, ignore_eos=True, n=3 if name == "d" else 1)
          for i, name in enumerate(PROMPTS)}  # fmt: skip
ANSWERS = cache(lambda name: answer(PROMPTS[name], PARAMS[name]))


def said_by(base: type, methods: dict) -> list[str]:
    """All that is said of a class. Each answer that has ended is right, and the engine can go on."""
    option = "scheduler_cls" if base is Scheduler else "block_manager_cls"
    said = []
    llm = None
    try:
        llm = new_llm(num_blocks=22, num_host_blocks=30, **{option: type("Own", (base,), methods)})
        for name, prompt in PROMPTS.items():
            llm.add_request(prompt, PARAMS[name], name)
    except ScheduleError as error:
        said.append(str(error))
    for _ in range(400 if llm else 0):
        if not llm.has_unfinished() or len(said) > 20:
            break
        try:
            for output in llm.step():
                if output.error:
                    assert isinstance(output.error, ScheduleError)
                    said.append(str(output.error))
                elif output.finished:
                    assert result(output) == ANSWERS(output.request_id)
        except ScheduleError as error:
            said.append(str(error))
    if llm is None:
        return said
    for name in [*llm.requests]:
        llm.abort(name)
    check_clean(llm)
    return said


def keys(*keys):
    """The priority of the request that comes first, second and so on."""
    return {"priority": lambda _, request: keys[min(request.arrival, len(keys) - 1)]}


def moves_away(self, schedule):
    if self.running and self.running[0] not in self.waiting:
        self.waiting.append(self.running[0])


def loses_blocks(self, request):
    self.running.remove(request)
    for seq in request.unfinished:
        seq.forget_blocks()
    self.waiting.append(request)


def keeps_blocks(self, seq, reason):
    seq.finish_reason = reason
    if seq.request.has_ended:
        self.running.remove(seq.request)


def without_prefix(self, seq, num_tokens):
    size = self.block_size
    for i in range(len(seq.prefix_ids), num_tokens // size):
        key = 0, tuple(seq.token_ids[i * size : (i + 1) * size])
        block = self.cached_blocks.setdefault(key, self.blocks[seq.block_table[i]])
        block.key = key
        self.unwritten.add(block.id)
        seq.prefix_ids.append(0)


def any_prefix(self, seq):
    return [*self.cached_blocks.values()][: (len(seq) - 1) // self.block_size]


def forks_in_silence(self, parent, child, num_tokens=None):
    BlockManager.fork(self, parent, child, num_tokens)
    for block_id in child.block_table:
        self.blocks[block_id].ref_count -= 1


def forks_too_far(self, parent, child, num_tokens=None):
    BlockManager.fork(self, parent, child, num_tokens)
    child.num_computed_tokens += 1


def frees_what_is_shared(self, seq):
    for block_id in seq.block_table:
        self.blocks[block_id].ref_count = 1
    BlockManager.free(self, seq)


def loses_copies(self):
    moves = BlockManager.take_moves(self)
    moves.copies.clear()
    return moves


def takes_the_same(self):
    self.blocks[0].ref_count += 1
    self.free_blocks.pop(0, None)
    return self.blocks[0]


NAN = float("nan")
INIT, OWN = BlockManager.__init__, type("Own", (BlockManager,), {})
COUNTS = "num_blocks_for max_blocks_needed num_new_blocks num_blocks_at_fork".split()
NAMED = [  # of a class, its methods, and what is said
    (Scheduler, {"__init__": lambda *_: None}, r"__init__\(\): it did nothing: does it call super\(\)\?"),
    (BlockManager, {"__init__": lambda *_: None}, r"__init__\(\): it did nothing: does it call super"),
    (BlockManager, {"__init__": lambda self, num_blocks, *sizes: INIT(self, 2 * num_blocks, *sizes)}, r"__init__\(\): it has 44 blocks, but the KV cache has 22"),
    (BlockManager, {"__init__": lambda self, num_blocks, size, *sizes: INIT(self, num_blocks, size // 2, *sizes)}, r"__init__\(\): it has 2 tokens per block, but the KV cache has 4"),
    (Scheduler, {"__init__": lambda self, limits, manager: Scheduler.__init__(self, limits, OWN(10_000, manager.block_size))}, r"__init__\(\): it has 10000 blocks, but the KV cache has 22"),
    (Scheduler, {"victims": lambda self, candidates: 1, "_victims": 1}, r"victims\(\): the engine does not call it. Is it victim\? If not, call it _victims"),
    (BlockManager, {"alocate": lambda self, seq, num_tokens: 1}, r"alocate\(\): the engine does not call it. Is it allocate"),
    (Scheduler, {"priority": lambda request: 1}, r"priority\(\): it must take \(self, request\)"),
    (Scheduler, {"may_admit": lambda self, request: True}, r"may_admit\(\): it must take \(self, request, schedule\)"),
    (BlockManager, {"can_admit": lambda self, request: True}, r"can_admit\(\): it must take \(self, request, num_reserved\)"),
    (Scheduler, {"priority": 5}, r"priority\(\): it is 5, and must be a method"),
    (Scheduler, {"priority": property(lambda self: 5)}, r"priority\(\): it is <property .*, and must be a method"),
    (Scheduler, {"watermark": lambda self: 0.1}, r"watermark\(\): it is <function .*, and must be a value"),
    *[(Scheduler, {"watermark": value}, rf"watermark\(\): it is {value!r}, and not a number from 0 to 1")
      for value in (None, NAN, "0.05", -5, 2)],
    (Scheduler, keys([NAN, 1]), r"priority\(\): it returned \[nan, 1\], and not a sort key"),
    (Scheduler, keys((0, (1, [NAN]))), r"priority\(\): it returned \(0, \(1, \[nan\]\)\), and not a sort key"),
    (Scheduler, keys({1}), r"priority\(\): it returned \{1\}, and not a sort key"),
    (Scheduler, keys((1, frozenset())), r"priority\(\): it returned \(1, frozenset\(\)\), and not a sort key"),
    (Scheduler, keys(np.ones(2)), r"priority\(\): it returned array.*, and not a sort key"),
    (Scheduler, keys((0, np.ones(2))), r"priority\(\): it returned \(0, array.*, and not a sort key"),
    (Scheduler, keys((0,), (1, object()), (1, object())), r"priority\(\): it returned \(1, <object"),
    (Scheduler, keys((1, object()), (2, 0), (1, object())), r"priority\(\): it"),
    (Scheduler, keys(0, "1") | {"priority_is_fixed": True}, r"priority\(\): it returned "),
    *[(Scheduler, {"may_admit": lambda *_, value=value: value}, r"may_admit\(\): it returned .*, and not True or False")
      for value in ("no", np.ones(2), [], 1)],
    *[(BlockManager, {name: lambda *_: None}, rf"{name}\(\): it returned None, and not a number that is not negative: is a `return` missing")
      for name in COUNTS],
    *[(Scheduler, {"reason_to_end": lambda self, seq, odd=odd: odd if seq.num_output_tokens == 3 else None}, rf"reason_to_end\(\): it returned {odd}, and not a text or None")
      for odd in (5, False)],  # the recovery does not believe it either
    *[(Scheduler, planned(change), r"schedule\(\): the sampled sequences do not match the items")
      for change in (one_prompt, small_chunks, preempts_what_it_has_planned)],  # what is cached must be computed
    (Scheduler, {"should_swap": lambda *_: "no"}, r"should_swap\(\): it returned 'no', and not True or False"),
    (Scheduler, {"victim": lambda self, _: self.waiting[0]}, r"victim\(\): it returned Request\(\w\), and not one of the"),
    (Scheduler, {"next_waiting": lambda self: (self.running + self.waiting)[0]}, r"next_waiting\(\): it returned Request\(\w\), and"),
    (Scheduler, {"set_max_len": lambda _, request: setattr(request, "max_len", 3)}, r"set_max_len\(\): max_len is 3: it must be an integer from 14 to 100"),
    (Scheduler, {"set_max_len": lambda _, request: setattr(request, "max_len", 10**6)}, r"set_max_len\(\): max_len is 1000000"),
    (Scheduler, {"make_room": moves_away}, r"make_room\(\): Request\(\w\) has not ended, but is 2 times in"),
    (Scheduler, {"enqueue": lambda self, request: self.waiting.extend([request] * 2)}, r"enqueue\(\): Request\(\w\) is in waiting 2 times"),
    (Scheduler, {"enqueue": lambda self, request: None}, r"enqueue\(\): the step has planned nothing, but .* neither waiting nor"),
    (Scheduler, {"update": lambda *_: None}, r"update\(\): it did nothing: does it call super\(\)\?"),
    (Scheduler, {"preempt": lambda *_: None}, r"preempt\(\): Request\(\w\) is still running"),
    (Scheduler, {"tokens_to_compute": lambda *_: None}, r"tokens_to_compute\(\): it returned None, and not a list of items"),
    (Scheduler, {"commit": lambda *_: None}, r"commit\(\): the step has planned nothing"),
    (Scheduler, {"tokens_to_compute": lambda *_: []}, r"tokens_to_compute\(\): the step has planned nothing"),
    (Scheduler, {"admit": lambda *_: None}, r"admit\(\): Request\(\w\) is not running, or still waiting"),
    (Scheduler, {"admit": lambda *_: None, "tokens_to_compute": lambda *_: []}, r"admit\(\): Request\(\w\) is not running"),
    (Scheduler, {"admit": lambda self, request: request.params.n == 1 and Scheduler.admit(self, request)}, r"admit\(\): Request\(d\) is not running"),
    (Scheduler, {"preempt": loses_blocks}, r"preempt\(\): the blocks \[.*\] are not free: does it call super"),
    (Scheduler, {"finish": keeps_blocks}, r"finish\(\): the blocks \[.*\] are not free: does it call super"),
    (Scheduler, {"finish": lambda *_: None}, r"finish\(\): .* has reached its end, \d+ tokens, and goes on: does it call super"),
    (Scheduler, {"schedule": lambda self: (Scheduler.schedule(self), Scheduler.schedule(self))[1]}, r"schedule\(\): Sequence.* reads block \d+, which does not hold its tokens"),
    (BlockManager, {"take_moves": lambda self: setattr(self, "moves", Moves()) or Moves()}, r"take_moves\(\): Sequence.* reads block"),
    (BlockManager, {"take_moves": loses_copies}, r"take_moves\(\): Sequence.* reads block"),
    (BlockManager, {"take_moves": lambda self: self.moves}, r"take_moves\(\): blocks are to be moved, but the schedule lacks them: call take_moves last"),
    (BlockManager, {"take_moves": lambda self: None}, r"take_moves\(\): it returned None, and not Moves"),
    (BlockManager, {"cache_full_blocks": without_prefix}, r"cache_full_blocks\(\): "),
    (BlockManager, {"find_prefix": any_prefix}, r"find_prefix\(\): Sequence.* reads block \d+, which does not hold its tokens"),
    (BlockManager, {"find_prefix": lambda self, seq: [self.blocks[0]] * 9}, r"find_prefix\(\): it returned \[Block"),
    (BlockManager, {"allocate": lambda *_: None}, r"allocate\(\): Sequence.* lacks blocks for \d+ tokens"),
    (BlockManager, {"free": lambda *_: None}, r"free\(\): the blocks \[.*\] are not free"),
    (BlockManager, {"free": frees_what_is_shared}, r"free\(\): "),
    (BlockManager, {"fork": forks_in_silence}, r"fork\(\): Sequence.* has more than Sequence.*, or a wrong ref_count"),
    (BlockManager, {"fork": forks_too_far}, r"fork\(\): Sequence.* has more than Sequence"),
    (BlockManager, {"take_block": takes_the_same}, r"take_block\(\): it returned Block"),
    (BlockManager, {"can_admit": lambda *_: False}, r"can_admit\(\): the step has planned nothing"),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(NAMED)))
def test_the_wrong_method_is_named(i):
    base, methods, message = NAMED[i]
    said = said_by(base, methods)
    assert said and re.match(rf"Own\.{message}", said[0]), said[:3]


def by_keyword(self, schedule):
    for request in self.waiting:
        assert self.may_admit(schedule=schedule, request=request) in (True, False)
        assert self.priority(request=request) is not None


def finished(self, request):
    return request.has_ended


def admits_all_that_fit(self, schedule):
    """Not in the order of `waiting`."""
    for request in list(self.waiting):
        if schedule.tokens_left > 0 and self.block_manager.can_admit(request):
            self.admit(request)
            self.commit(self.tokens_to_compute(request, schedule), schedule)


RIGHT = [
    {"schedule_waiting": admits_all_that_fit, "priority": attrgetter("arrival")},
    {"reason_to_end": lambda *_: None},  # a sequence ends by its length all the same
    {"dequeue": lambda self, request: request, "finished": finished, "preempted": lambda self, request: 0},
    {"make_room": lambda *_: None},
    {"preempted": 0, "finished": property(finished), "victims": [], "_dequeue": 1},
    {"victims": lambda self: self.running[-2:], "victim": lambda self, candidates: candidates[-1]},
    {"make_room": by_keyword, "may_admit": lambda self, request, schedule: np.True_, "priority": lambda self, request: request.arrival},
    {"priority": staticmethod(lambda request: np.float64(request.arrival)), "watermark": np.float32(0.1)},
    {"priority": lambda self, request: [request.arrival, request], "should_swap": lambda *_: np.bool_(0)},
    {"watermark": property(lambda self: len(self.waiting) / 100), "step_budget": lambda self, *_: (40, 40)},
    {"finish": lambda self, seq, reason: Scheduler.finish(self, seq, reason) or Scheduler.finish(self, seq, reason)},
    {"preempt": lambda self, request: Scheduler.preempt(self, request), "unfinished": lambda self: []},
    {"schedule": lambda self: Scheduler.schedule(self), "admit": lambda self, request: Scheduler.admit(self, request=request)},
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(RIGHT)))
def test_what_is_right_is_not_refused(i):
    assert said_by(Scheduler, RIGHT[i]) == []
