"""Public tests of assignment template: is the scheduler correct?

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/template
"""

from itertools import repeat
from pathlib import Path

from nanovllm.simulator import simulate
from tutorials.assignments.public import solution
from tutorials.assignments.public_tests import PublicTests
from tutorials.assignments.task import load_task
from tutorials.simulation.workloads import fixed, labelled, merged, poisson, workload

PART = load_task("template").parts[0]
MODULE = solution(Path(__file__).with_name("starter.py"))


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
