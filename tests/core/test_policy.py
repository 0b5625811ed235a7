"""Each method of a scheduler's policy decides what it is said to decide. Whatever it decides,
answers stay right: that is in test_scheduler.py.

Run: pytest tests/core/test_policy.py [-k watermark]
"""

import pytest
from fake_model import FakeRunner
from scheduling import new_request, new_scheduler, step

from nanovllm import SamplingParams
from nanovllm.scheduler import Scheduler


def playing(methods, prompts, max_tokens=4, **options):
    """A scheduler with these methods of its own and these prompts, each of one length or list, and
    its model."""
    cls = type("Policy", (Scheduler,), methods)
    scheduler = new_scheduler(cls=cls, **options)
    for i, prompt in enumerate(prompts):
        token_ids = [i] * prompt if isinstance(prompt, int) else prompt
        scheduler.add(new_request(i, token_ids, max_tokens))
    return scheduler, FakeRunner(4)


def names(requests) -> list[str]:
    return [request.request_id for request in requests]


def last_first(self, request):
    return -request.arrival


def test_running_order_decides_about_tokens_and_priority_about_admission():
    scheduler, runner = playing({"running_order": last_first}, [12, 12, 12], tokens=16)
    assert [step(scheduler, runner) for _ in range(3)] == [
        [("0", 12), ("1", 4)],
        [("1", 8), ("0", 1), ("2", 7)],
        [("2", 5), ("1", 1), ("0", 1)],
    ]


def decodes_first(self, request):
    return request.is_prefilling, self.priority(request)


def test_decodes_first():
    """With the last first, a new prompt would take the budget from the decodes."""
    for own, plan in (({"running_order": decodes_first}, [("0", 1), ("1", 15)]), ({}, [("1", 16)])):
        scheduler, runner = playing({"priority": last_first} | own, [5], tokens=16)
        step(scheduler, runner)
        scheduler.add(new_request(1, [1] * 40))
        step(scheduler, runner)
        assert step(scheduler, runner) == plan


def test_next_waiting_may_be_any_request_or_none():
    second = {"next_waiting": lambda self: self.waiting[1] if len(self.waiting) > 1 else None}
    scheduler, runner = playing(second, [3, 3, 3])
    assert step(scheduler, runner) == [("1", 3), ("2", 3)] and names(scheduler.waiting) == ["0"]


def at_most_two(self, request, schedule):
    return len(self.running) < 2 and schedule.tokens_left > 4


def test_may_admit():
    scheduler, runner = playing({"may_admit": at_most_two}, [3, 3, 3])
    assert step(scheduler, runner) == [("0", 3), ("1", 3)]
    scheduler, runner = playing({"may_admit": at_most_two}, [12, 3], tokens=16)
    assert step(scheduler, runner) == [("0", 12)]  # 4 tokens are left


BUDGETS = [
    # no prompt is admitted once the prompt budget is used
    ((16, 8), [8, 8], [[("0", 8)]], ["1"]),
    # a prompt budget above the budget of the step changes nothing
    ((6, 100), [9, 9], [[("0", 6)]], ["1"]),
    ((6, 100), [9, 9], [[("0", 6)], [("0", 3), ("1", 3)], [("0", 1), ("1", 5)]], []),
]


@pytest.mark.parametrize("budget, prompts, plans, waiting", BUDGETS)
def test_step_budget(budget, prompts, plans, waiting):
    """And a request that waits has no blocks."""
    scheduler, runner = playing({"step_budget": lambda self: budget}, prompts, tokens=16)
    assert [step(scheduler, runner) for _ in plans] == plans and names(scheduler.waiting) == waiting
    tables = [seq.block_table for request in scheduler.running for seq in request.sequences]
    assert scheduler.block_manager.num_used_blocks == sum(map(len, tables))


def test_a_budget_below_the_number_of_decodes():
    few = {"step_budget": lambda self: (2, 2) if self.running else (16, 16)}
    scheduler, runner = playing(few, [3, 3, 3], tokens=16)
    step(scheduler, runner)
    assert step(scheduler, runner) == [("0", 1), ("1", 1)]


def test_the_prompt_tokens_of_a_step_are_bounded_and_its_decodes_are_not():
    bounded = {"step_budget": lambda self: (self.max_num_batched_tokens, 5)}
    scheduler, runner = playing(bounded, [4, 9, 2], tokens=16)
    assert [step(scheduler, runner) for _ in range(4)] == [
        [("0", 4), ("1", 1)],
        [("0", 1), ("1", 5)],
        [("0", 1), ("1", 3), ("2", 2)],
        [("0", 1), ("1", 1), ("2", 1)],
    ]
    # `left` and `sign` may change from step to step
    none_left = {
        "step_budget": lambda self: (16, self.left),
        "running_order": lambda self, r: self.sign * r.arrival,
    }
    scheduler, runner = playing(none_left | {"left": 5, "sign": -1}, [2, 9])
    assert step(scheduler, runner) == [("0", 2), ("1", 3)]
    scheduler.left = 0
    assert step(scheduler, runner) == [("0", 1)]  # it is behind one that gets no token
    scheduler.left, scheduler.sign = 9, 1
    assert step(scheduler, runner) == [("0", 1), ("1", 6)]


@pytest.mark.parametrize(
    "methods, victim", [({}, "2"), ({"victim": lambda self, candidates: candidates[0]}, "1")]
)
def test_victim(methods, victim):
    """The candidates are the requests behind the one that needs a block."""
    scheduler, runner = playing(methods, [4, 4, 4], max_tokens=9, num_blocks=6)
    while not scheduler.num_preemptions:
        step(scheduler, runner)
    assert names(scheduler.waiting) == [victim]
    seen = []
    mine = {
        "running_order": last_first,
        "victim": lambda _, some: seen.append(names(some)) or some[0],
    }
    scheduler, runner = playing(mine, [4, 4, 4], max_tokens=9, num_blocks=6)
    while not scheduler.num_preemptions:
        step(scheduler, runner)
    assert seen == [["1", "0"]]  # in the running order
    scheduler, runner = new_scheduler(num_blocks=7), FakeRunner(4)
    for i, (prompt, length, n) in enumerate([(7, 5, 3), (3, 9, 1), (3, 9, 1)]):
        scheduler.add(new_request(i, [i] * prompt, length, n))
    while not scheduler.num_preemptions:
        plan = step(scheduler, runner)
    assert plan == [("0", 1)] * 3 and names(scheduler.waiting) == ["1", "2"]  # it needed two


def test_should_swap():
    long = {"should_swap": lambda self, request: len(request.prompt_token_ids) > 5}
    blocks = {"num_blocks": 5, "num_host_blocks": 9}
    for prompt, is_swapped in ((5, False), (6, True)):
        scheduler, runner = playing(long, [4, prompt], max_tokens=9, **blocks)
        while not scheduler.num_preemptions:
            step(scheduler, runner)
        assert bool(scheduler.waiting[0].sequences[0].host_table) == is_swapped


def test_reason_to_end():
    """The policy's reason, at any length; the length, if there is none."""

    def reason_to_end(self, seq):
        is_short = seq.request.request_id == "0" and seq.num_output_tokens == 2
        return "enough" if is_short else Scheduler.reason_to_end(self, seq)

    scheduler, runner = playing({"reason_to_end": reason_to_end}, [3, 3])
    sequences = [request.sequences[0] for request in scheduler.waiting]
    while scheduler.has_unfinished():
        step(scheduler, runner)
    ends = [(seq.finish_reason, seq.num_output_tokens) for seq in sequences]
    assert ends == [("enough", 2), ("length", 4)]


def is_urgent(self, request):
    return not request.params.extra_args.get("urgent"), request.arrival


def make_room(self, schedule):
    assert schedule.tokens_left == 16  # the budget is known
    both = self.waiting and self.running
    if both and self.priority(self.waiting[-1]) < self.priority(self.running[0]):
        self.preempt(max(self.running, key=self.priority))


@pytest.mark.parametrize("num_host_blocks", [0, 9])
def test_make_room_for_an_urgent_request(num_host_blocks):
    """It takes the seat in the same step, and the blocks, which may be swapped out and in by one
    step."""
    methods = {"priority": is_urgent, "make_room": make_room}
    blocks = {"num_blocks": 6, "num_host_blocks": num_host_blocks}
    scheduler, runner = playing(methods, [4, 4], seqs=2, **blocks)
    step(scheduler, runner)
    urgent = new_request(2, [2] * 16)
    urgent.params.extra_args["urgent"] = True
    scheduler.add(urgent)
    assert step(scheduler, runner) == [("0", 1), ("2", 15)] and names(scheduler.waiting) == ["1"]
    assert bool(scheduler.waiting[0].sequences[0].host_table) == bool(num_host_blocks)
    while scheduler.has_unfinished():
        step(scheduler, runner)
    assert scheduler.block_manager.num_used_blocks == 0


def test_watermark():
    """A part of all blocks stays free at admission, unless no request runs."""
    for part, running in (
        (0, ["0", "1", "2"]),
        (0.05, ["0", "1", "2"]),
        (0.1, ["0", "1", "2"]),
        (0.2, ["0", "1"]),
        (1, ["0"]),
    ):
        scheduler, runner = playing({}, [10, 10, 10], num_blocks=10, tokens=64)
        scheduler.watermark = part
        step(scheduler, runner)
        assert names(scheduler.running) == running, part


def test_extra_args_are_the_requests_own():
    given = {"tenant": "a"}
    params = SamplingParams(extra_args=given)
    given["tenant"] = "b"
    assert params.extra_args == {"tenant": "a"} and SamplingParams().extra_args == {}
