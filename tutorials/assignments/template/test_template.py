"""Public tests of assignment template: is the scheduler correct?

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/template
"""

from itertools import repeat

from nanovllm import simulate
from tutorials.assignments.public_tests import PublicTests, under_test
from tutorials.simulation.workloads import fixed, labelled, merged, poisson, workload

PART, MODULE = under_test(__file__)


class TestRules(PublicTests):
    part, module = PART, MODULE


def test_the_batch_job_uses_the_seats_that_people_leave():
    """For 15 s, people come who take most of the seats, but not all. The batch job comes after
    2 s."""
    people = labelled(workload(poisson(rate=14), fixed(50, 60), 210), batch=False)
    batch = labelled(workload(repeat(2.0), fixed(50, 60), 10), batch=True)
    run = simulate(merged(people, batch), PART.config, PART.hardware, MODULE.MyScheduler)
    last = max(served.token_times[0] for served in run.requests if served.job.extra_args["batch"])
    assert last < 8, f"the last request of the batch job starts after {last:.0f} s"
