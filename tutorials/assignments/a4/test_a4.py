"""Public tests of assignment 4: is the scheduler correct?

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/a4
"""

from itertools import repeat

import pytest

from nanovllm import simulate
from nanovllm.config import Config
from tutorials.assignments.public_tests import PublicTests, under_test
from tutorials.simulation.workloads import fixed, merged, poisson, workload

PART, MODULE = under_test(__file__)


class TestRules(PublicTests):
    part, module = PART, MODULE


@pytest.mark.parametrize("mode", ("swap", "recompute"))
def test_a_request_as_large_as_the_memory_is_answered_too(mode):
    """It needs 297 of 300 blocks: no part of them can be left free. Others come before and after
    it."""
    others = workload(poisson(rate=20), fixed(50, 400), 40)
    large = workload(repeat(1.0), fixed(4500, 240), 1)
    config = Config(
        model="qwen3-8b", num_blocks=300, max_model_len=4752, preemption_mode=mode, swap_gib=0.2
    )
    jobs = [job._replace(max_tokens=job.num_outputs) for job in merged(others, large)]
    run = simulate(jobs, config, PART.hardware, MODULE.MyScheduler, check=True)
    assert all(len(served.token_times) == served.job.num_outputs for served in run.requests)
