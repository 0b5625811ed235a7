"""Public tests of assignment 9: is the scheduler correct?

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/a9
"""

from dataclasses import replace

from nanovllm import Job, Run
from nanovllm.scheduler import Scheduler
from tutorials.assignments.public import class_of
from tutorials.assignments.public_tests import PublicTests, under_test
from tutorials.assignments.task import serve

PART, MODULE = under_test(__file__)
MyScheduler = class_of(MODULE, "MyScheduler", Scheduler)


class TestRules(PublicTests):
    part, module = PART, MODULE


def served(jobs: list[Job]) -> Run:
    return serve(replace(PART, workload=lambda seed: jobs), MyScheduler, seed=1)


def answer(time: float, right_draft_tokens: list[int]) -> Job:
    return Job(time, ((1, 100),), len(right_draft_tokens), right_draft_tokens=right_draft_tokens)


def test_one_answer_that_copies_takes_half_of_the_steps():
    run = served([answer(0.0, [min(16, left) for left in range(200, 0, -1)])])
    assert run.num_steps <= 100, f"{run.num_steps} steps for 200 tokens that are in the question"


def test_an_answer_that_copies_late_gets_draft_tokens_then():
    """Its first 100 tokens are new."""
    run = served([answer(0.0, [0] * 100 + [min(16, left) for left in range(200, 0, -1)])])
    assert run.num_steps <= 220, f"{run.num_steps} steps: 100 new tokens, and 200 to copy"
