"""Public tests of assignment 7: is the scheduler correct?

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/a7
"""

from nanovllm import simulate
from tutorials.assignments.a7.task import SLO
from tutorials.assignments.public_tests import PublicTests, under_test
from tutorials.simulation.metrics import meets
from tutorials.simulation.workloads import labelled, poisson, predicted, sharegpt, workload

PART, MODULE = under_test(__file__)


class TestRules(PublicTests):
    part, module = PART, MODULE


def test_under_a_light_load_all_meet_the_slo():
    jobs = predicted(labelled(workload(poisson(rate=2), sharegpt(), 40), tenant="A"), sigma=0.4)
    run = simulate(jobs, PART.config, PART.hardware, MODULE.MyScheduler)
    late = [i for i, served in enumerate(run.requests) if not meets(served, SLO)]
    assert not late, f"the server is half empty, but the requests {late} are late"
