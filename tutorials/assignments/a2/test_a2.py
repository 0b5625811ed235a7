"""Public tests of assignment 2: is the scheduler correct?

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/a2
"""

from nanovllm import Job, simulate
from tutorials.assignments.public_tests import PublicTests, under_test

PART, MODULE = under_test(__file__)


class TestRules(PublicTests):
    part, module = PART, MODULE


def test_a_prompt_that_is_alone_makes_progress_in_every_step():
    """No other request runs, so the steps need not be short; but each must compute something, up to
    the last token."""
    run = simulate(
        [Job(0.0, ((1, 8000),), 10)],
        PART.config,
        PART.hardware,
        MODULE.MyScheduler,
        True,
        keep_steps=True,
    )
    assert all(step.items for step in run.steps)
    assert len(run.requests[0].token_times) == 10
