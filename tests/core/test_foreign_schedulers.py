"""A scheduler or a block manager of a user that is wrong is named in a sentence that says what is wrong, the engine goes
on, and no request gets a wrong token.

What a policy may decide is in test_policy.py, hooks that raise are in test_misuse.py.

Run: pytest tests/core/test_foreign_schedulers.py [-k preempt]
"""

import pytest
from fake_engine import check_clean, go_on, new_llm, raise_at
from fake_model import FakeRunner
from scheduling import new_request, new_scheduler, step

from nanovllm import SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.schedule import Item, Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.topics.checks.policies import check_policy

# --- what one plan shows ---


def planned(change):
    """A `schedule` that plans as ours does, and then does this with the plan."""

    def schedule(self):
        schedule = Scheduler.schedule(self)
        return change(self, schedule) or schedule

    return {"schedule": schedule}


def without_blocks(self):
    schedule = Schedule()
    while self.waiting:
        request = self.waiting.pop(0)
        self.running.append(request)
        seq = request.sequences[0]
        schedule.add(Item(seq, 0, seq.num_missing_tokens))
    return schedule


def in_its_own_way(self):
    """It leaves the copies where they are."""
    schedule = Schedule(*self.step_budget())
    self.schedule_running(schedule)
    self.schedule_waiting(schedule)
    return schedule


def without_copies(self, plan, schedule):
    if schedule.items or plan[0].num_tokens > 1:
        return Scheduler.commit(self, plan, schedule)
    for item in plan:
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


def take_a_decode_out(self, schedule):
    if schedule.items[-1].num_tokens == 1:
        del schedule.items[-1]


WRONG = {  # methods of a scheduler, what is said of it, and the number of samples
    "plans nothing": ({"schedule": lambda self: Schedule()}, r"Wrong.schedule\(\): it planned nothing, but there are unfinished requests: \['0', '1'\]", 1),
    "returns nothing": ({"schedule": lambda self: None}, r"Wrong.schedule\(\): it returned None, and not a Schedule", 1),
    "loses a request": ({"schedule": forgets_the_last_that_waits}, r"there are unfinished requests: \['1'\]; neither waiting nor running: \['1'\]", 1),
    "plans an item twice": (planned(lambda self, plan: plan.items.append(plan.items[0])), r"Sequence\(0.0: .*\) is in the schedule twice", 1),
    "spends too much": ({"step_budget": lambda self: (10**6, 10**6)}, "the schedule has 80 tokens, but max_num_batched_tokens=40", 1),
    "allocates no blocks": ({"schedule": without_blocks}, "lacks blocks for 40 tokens: allocate them first", 1),
    "ends what runs": (planned(lambda self, plan: self.running.clear()), "is in the schedule, but it has ended, or its request is not in scheduler.running", 1),
    "computes too many tokens": (replace_item(-1, num_tokens=lambda item: item.num_tokens + 1), "is to compute 41 tokens, but 40 are missing", 1),
    "starts at another token": (replace_item(0, start=lambda _: 1, num_tokens=lambda _: 1), "is to compute tokens from 1 on, but that is not the next one", 1),
    "spends one number": ({"step_budget": lambda self: 7}, r"Wrong.step_budget\(\): it returned 7, and not two integers", 1),
    "spends halves": ({"step_budget": lambda self: (10.5, 3.2)}, r"it returned \(10.5, 3.2\), and not two integers", 1),
    "forgets a return": ({"may_admit": lambda *_: None}, r"may_admit\(\): it returned None, and not True or False: is a `return` missing", 1),
    "has no order": ({"running_order": lambda *_: None}, r"running_order\(\): it returned None, and not a sort key", 1),
    "has NaN in its order": ({"running_order": lambda *_: (0, float("nan"))}, r"running_order\(\): it returned \(0, nan\)", 1),
    "mixes its keys": ({"running_order": lambda _, r: r.arrival if r.arrival % 2 else "0"}, r"running_order\(\): it returned ", 1),
    "computes half a token": (replace_item(0, num_tokens=lambda item: item.num_tokens / 2), r"is to compute \d+.0 tokens", 1),
    "has no end": ({"set_max_len": lambda _, request: setattr(request, "max_len", 10**6)}, r"has \d+ tokens, but max_model_len=\d+", 1),
    "forgets moves": ({"schedule": in_its_own_way}, "blocks are to be moved, but the schedule lacks them: call take_moves last", 3),
    "copies nothing": ({"commit": without_copies}, r"is to write into block \d+, which others read", 3),
    "takes an item out": (planned(take_a_decode_out), "the sampled sequences do not match the items: add items with commit only", 3),
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
    if name in ("plans nothing", "returns nothing", "allocates no blocks", "ends what runs"):
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


@pytest.mark.parametrize("change", [one_prompt, small_chunks, preempts_what_it_has_planned])
def test_what_is_cached_must_be_computed(change):
    """The blocks of what was taken out stay cached, but no step has written them: wrong answers,
    in silence."""
    wrong = type("Wrong", (Scheduler,), planned(change))
    llm = new_llm(scheduler_cls=wrong, max_num_batched_tokens=100)
    prompts = [[1] * 30, [2] * 21, [2] * 21, [2] * 21]
    with pytest.raises(ScheduleError):
        llm.generate(prompts, SamplingParams(seed=1, max_tokens=5), use_tqdm=False)


# --- what a method returns or leaves undone ---


CHOICES = {
    "victim": lambda self, _: self.waiting[0],
    "next_waiting": lambda self: (self.running + self.waiting)[0],
}


@pytest.mark.parametrize("method", CHOICES)
def test_a_request_that_cannot_be_chosen(method):
    cls = type("Wrong", (Scheduler,), {method: CHOICES[method]})
    scheduler, runner = new_scheduler(num_blocks=4, seqs=2, cls=cls), FakeRunner(4)
    check_policy(scheduler)
    for i in range(3):
        scheduler.add(new_request(i, [i] * 4, max_tokens=9))
    with pytest.raises(ScheduleError, match=rf"Wrong.{method}\(\): it returned Request\(\d\), and"):
        for _ in range(10):
            step(scheduler, runner)


def test_a_misspelt_method_is_named():
    cls = type("Wrong", (Scheduler,), {"victims": lambda self, candidates: 1, "_victims": 1})
    with pytest.raises(ScheduleError, match=r"Wrong.victims\(\): nothing uses it. Is it victim"):
        new_llm(scheduler_cls=cls)


class Forgets(Scheduler):
    def update(self, schedule, token_ids, logprobs=None):
        return schedule.sampled  # no super().update(...)


def test_an_update_that_changes_nothing_is_told_so():
    llm = new_llm(scheduler_cls=Forgets)
    llm.add_request([5] * 9)
    with pytest.raises(ScheduleError):
        go_on(llm, 50)


def test_a_finish_that_forgets_to_end_is_told_so():
    """The sequence went on beyond its longest text, up to an index that is out of range."""

    class Counts(Scheduler):
        ended = 0

        def finish(self, seq, reason):
            self.ended += 1

    llm = new_llm(scheduler_cls=Counts)
    llm.add_request([5] * 9, SamplingParams(max_tokens=5))
    message = (
        r"Counts.finish\(\): .* has reached its end, 14 tokens, and goes on: does it call super"
    )
    with pytest.raises(ScheduleError, match=message):
        go_on(llm, 10)


def test_a_preempt_that_refuses_is_told_so():
    """The step looked for room forever."""

    class Protects(Scheduler):
        def preempt(self, request):
            if request.request_id == "vip":
                return
            super().preempt(request)

    llm = new_llm(num_blocks=8, scheduler_cls=Protects)
    for name in ("a", "vip"):
        llm.add_request([5, len(name)] * 6, SamplingParams(max_tokens=18, seed=1), name)
    with pytest.raises(
        ScheduleError, match=r"Protects.preempt\(\): Request\(vip\) is still running"
    ):
        go_on(llm)
    llm.abort("vip")
    assert len(go_on(llm)["a"].outputs[0].token_ids) == 18
    check_clean(llm)


def test_a_forgotten_reason_to_end():
    """The sequence ends by its length all the same."""
    llm = new_llm(scheduler_cls=type("Odd", (Scheduler,), {"reason_to_end": lambda *_: None}))
    (output,) = llm.generate([5], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs
    assert (len(output.token_ids), output.finish_reason) == (3, "length")
    check_clean(llm)


@pytest.mark.parametrize("odd", [5, False])
def test_a_reason_to_end_that_is_no_text_is_believed_nowhere(odd):
    class Odd(Scheduler):
        def reason_to_end(self, seq):
            return odd if seq.num_output_tokens == 3 else super().reason_to_end(seq)

    llm = new_llm(scheduler_cls=Odd)
    llm.add_request([5] * 4, SamplingParams(max_tokens=8, ignore_eos=True), "a")
    problems = []
    for _ in range(20):
        try:
            for output in llm.step():
                assert output.outputs[0].finish_reason in (None, "length", "error")
        except ScheduleError as error:
            problems.append(str(error))
    assert problems and f"it returned {odd}, and not a text or None" in problems[0]


# --- what many steps show ---


class PreemptsAll(Scheduler):
    def make_room(self, schedule):
        for request in [*self.running]:
            self.preempt(request)


def test_a_livelock_ends_with_a_sentence():
    """Each step computes something, and throws away what the one before has computed."""
    llm = new_llm(scheduler_cls=PreemptsAll, enable_prefix_caching=False)
    message = r"PreemptsAll.schedule\(\): 101 steps without a new token"
    with pytest.raises(ScheduleError, match=message):
        llm.generate([[1] * 60, [2] * 60], SamplingParams(max_tokens=3), use_tqdm=False)
    check_clean(llm)


# --- what is right, but unusual ---


class SkipsWhatDoesNotFit(Scheduler):
    def schedule_waiting(self, schedule):
        for request in list(self.waiting):
            if schedule.tokens_left > 0 and self.block_manager.can_admit(request):
                self.admit(request)
                self.commit(self.tokens_to_compute(request, schedule), schedule)


def test_the_request_that_is_admitted_is_the_one_that_was_given():
    """`admit` popped waiting[0], whichever request that is."""
    llm = new_llm(scheduler_cls=SkipsWhatDoesNotFit, num_blocks=12)
    prompts = [[1] * 30, [2] * 30, [3] * 5]
    llm.generate(prompts, SamplingParams(seed=1, max_tokens=5), use_tqdm=False)


class NoBlockFree(BlockManager):
    def can_admit(self, request, num_reserved=0):
        return True


def test_running_out_of_blocks_has_a_message():
    llm = new_llm(block_manager_cls=NoBlockFree, num_blocks=12)
    seen = []
    real = llm.recovery._on_failed_step
    llm.recovery._on_failed_step = lambda error: (seen.append(error), real(error))
    llm.generate(
        [[1] * 30, [2] * 30, [3] * 30], SamplingParams(seed=1, max_tokens=5), use_tqdm=False
    )
    assert seen and all("no free block" in str(error) for error in seen)


def test_static_batching_after_a_failure_while_planning():
    """A request that runs apart is not in its batch: nothing is planned, again and again."""
    from tutorials.baselines.static_batching import StaticBatching

    llm = new_llm(scheduler_cls=StaticBatching)
    llm.scheduler.max_num_seqs = 2
    for i in range(6):
        llm.add_request([i + 1] * 6, SamplingParams(seed=i, max_tokens=6), str(i))
    raise_at(llm.scheduler, "priority", 9, RuntimeError)
    assert len(go_on(llm)) == 6


# --- how it is made ---


class NoSuper(Scheduler):
    def __init__(self, limits, block_manager):
        self.seen = 0


class NoBlocksOfItsOwn(BlockManager):
    def __init__(self, *sizes):
        self.seen = 0


class TwiceAsMany(BlockManager):
    def __init__(self, num_blocks, *others):
        super().__init__(2 * num_blocks, *others)


class HalfTheSize(BlockManager):
    def __init__(self, num_blocks, block_size, *others):
        super().__init__(num_blocks, block_size // 2, *others)


class OtherBlocks(Scheduler):
    def __init__(self, limits, block_manager):
        super().__init__(limits, BlockManager(10_000, block_manager.block_size))


@pytest.mark.parametrize(
    "cls, message",
    [
        (NoSuper, r"NoSuper.__init__\(\): it did nothing: does it call super\(\)\?"),
        (NoBlocksOfItsOwn, r"NoBlocksOfItsOwn.__init__\(\): it did nothing: does it call super"),
        (TwiceAsMany, r"TwiceAsMany.__init__\(\): it has 2000 blocks, but the KV cache has 1000"),
        (HalfTheSize, "it has 2 tokens per block, but the KV cache has 4"),
        (OtherBlocks, r"BlockManager.__init__\(\): it has 10000 blocks, but the KV cache has 1000"),
    ],
)
def test_what_was_made_wrongly_is_told_at_once(cls, message):
    """A block that the cache has not was a segmentation fault, and blocks of another size wrong tokens."""
    name = "scheduler_cls" if issubclass(cls, Scheduler) else "block_manager_cls"
    with pytest.raises(ScheduleError, match=message):
        new_llm(**{name: cls})


# --- blocks that are counted wrongly: others' tokens would be wrong ---


class ForksInSilence(BlockManager):
    def fork(self, parent, child, num_tokens=None):
        super().fork(parent, child, num_tokens)
        for block_id in child.block_table:
            self.blocks[block_id].ref_count -= 1


class FreesWhatIsShared(BlockManager):
    def free(self, seq):
        for block_id in seq.block_table:
            self.blocks[block_id].ref_count = 1
        super().free(seq)


@pytest.mark.parametrize("cls", [ForksInSilence, FreesWhatIsShared])
def test_a_block_manager_that_counts_wrongly_is_told_so(cls):
    llm = new_llm(block_manager_cls=cls)
    message = rf"Scheduler.schedule\(\): the blocks of {cls.__name__} do not add up: "
    prompts = [[1] * 9, [2] * 9, [1] * 9]
    params = [SamplingParams(n=3, seed=i, max_tokens=3 + 4 * i) for i in range(3)]
    with pytest.raises(ScheduleError, match=message):
        for _ in range(3):
            llm.generate(prompts, params, use_tqdm=False)
