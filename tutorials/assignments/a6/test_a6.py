"""Public tests of assignment 6: is the scheduler correct?

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/a6
"""

from itertools import repeat

from nanovllm import simulate
from tutorials.assignments.public_tests import PublicTests, under_test
from tutorials.simulation.workloads import fixed, labelled, merged, poisson, workload

PART, MODULE = under_test(__file__)


class TestRules(PublicTests):
    part, module = PART, MODULE


def test_a_patient_request_is_answered_while_urgent_ones_keep_coming():
    """For 40 s, urgent requests keep half of the seats busy. There is room for a patient one."""
    urgent = workload(poisson(rate=22), fixed(50, 40), 880)
    urgent = labelled(urgent, urgent=True, deadline=0.85, predicted_tokens=40)
    patient = labelled(
        workload(repeat(5.0), fixed(50, 500), 1), urgent=False, deadline=10, predicted_tokens=500
    )
    run = simulate(merged(urgent, patient), PART.config, PART.hardware, MODULE.MyScheduler)
    served = next(served for served in run.requests if served.job.num_outputs == 500)
    assert served.token_times[-1] < 30, (
        f"the patient request ends after {served.token_times[-1]:.0f} s: it starves"
    )
