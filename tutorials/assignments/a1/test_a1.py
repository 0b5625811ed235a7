"""Public tests of assignment 1: is the scheduler correct?

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/a1
"""

from itertools import repeat

from nanovllm import simulate
from tutorials.assignments.public_tests import PublicTests, under_test
from tutorials.simulation.workloads import fixed, labelled, merged, poisson, workload

PART, MODULE = under_test(__file__)


class TestRules(PublicTests):
    part, module = PART, MODULE


def test_a_long_request_starts_while_short_ones_keep_coming():
    """For 40 s, more short requests come than can be served. A long one comes after 5 s."""
    short = labelled(workload(poisson(rate=60), fixed(50, 50), 2400), predicted_tokens=50)
    long = labelled(workload(repeat(5.0), fixed(50, 500), 1), predicted_tokens=500)
    run = simulate(merged(short, long), PART.config, PART.hardware, MODULE.MyScheduler)
    served = next(served for served in run.requests if served.job.num_outputs == 500)
    assert served.token_times[0] < 40, (
        f"the long request starts after {served.token_times[0]:.0f} s: it starves"
    )
