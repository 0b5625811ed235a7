"""Public tests of assignment 3: is the scheduler correct?

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/a3
"""

from nanovllm import simulate
from tutorials.assignments.public_tests import PublicTests, under_test
from tutorials.simulation.workloads import labelled

PART, MODULE = under_test(__file__)


class TestRules(PublicTests):
    part, module = PART, MODULE


def test_a_tenant_that_is_alone_may_use_the_whole_server():
    jobs = labelled(PART.workload(1)[:200], tenant="A")
    alone = simulate(jobs, PART.config, PART.hardware, MODULE.MyScheduler)
    fcfs = simulate(jobs, PART.config, PART.hardware)
    assert alone.seconds < 1.05 * fcfs.seconds, (
        f"it takes {alone.seconds:.1f} s, and FCFS {fcfs.seconds:.1f} s"
    )
