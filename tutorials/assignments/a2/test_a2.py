"""Public tests of assignment 2: is the scheduler correct?

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/a2
"""

from pathlib import Path

import pytest

from nanovllm.simulator import Job, simulate
from tutorials.assignments.public import check_answers, check_rules, solution
from tutorials.assignments.task import PUBLIC_SEEDS, load_task

PART = load_task("a2").parts[0]
MODULE = solution(Path(__file__).with_name("starter.py"))


@pytest.mark.parametrize("seed", PUBLIC_SEEDS)
def test_every_request_is_answered_and_every_step_keeps_the_rules(seed):
    check_rules(PART, MODULE, seed)


def test_the_real_engine_gives_the_same_answers():
    check_answers(MODULE)


def test_a_prompt_that_is_alone_makes_progress_in_every_step():
    """Nobody else runs, so the steps need not be short; but each must compute something, up to the last token."""
    run = simulate([Job(0.0, ((1, 8000),), 10)], PART.config, PART.hardware, MODULE.MyScheduler, True, keep_steps=True)
    assert all(step.items for step in run.steps)
    assert len(run.requests[0].token_times) == 10
