"""Public tests of assignment 5: is the scheduler correct?

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/a5
"""

from itertools import repeat

from nanovllm import simulate
from tutorials.assignments.public_tests import PublicTests, under_test
from tutorials.simulation.workloads import fixed, merged, poisson, shared_prefix, workload

PART, MODULE = under_test(__file__)


class TestRules(PublicTests):
    part, module = PART, MODULE


def test_a_request_without_a_prefix_starts_while_others_that_have_one_keep_coming():
    """For 12 s, more questions about one document come than can be served. One that shares nothing
    comes after 5 s."""
    questions = shared_prefix(
        poisson(rate=50), fixed(50, 100), 600, num_prefixes=1, prefix_tokens=500
    )
    single = workload(repeat(5.0), fixed(300, 100), 1)
    run = simulate(merged(questions, single), PART.config, PART.hardware, MODULE.MyScheduler)
    served = next(served for served in run.requests if len(served.job.prompt) == 1)
    assert served.token_times[0] < 18, f"it starts after {served.token_times[0]:.0f} s: it starves"
