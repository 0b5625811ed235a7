"""Public tests of assignment 3: is the scheduler correct?

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/a3
"""

from pathlib import Path

import pytest

from nanovllm.simulator import simulate
from tutorials.assignments.public import check_answers, check_rules, solution
from tutorials.assignments.task import PUBLIC_SEEDS, load_task
from tutorials.simulation.workloads import labelled

PART = load_task("a3").parts[0]
MODULE = solution(Path(__file__).with_name("starter.py"))


@pytest.mark.parametrize("seed", PUBLIC_SEEDS)
def test_every_request_is_answered_and_every_step_keeps_the_rules(seed):
    check_rules(PART, MODULE, seed)


def test_the_real_engine_gives_the_same_answers():
    check_answers(MODULE)


def test_a_tenant_that_is_alone_may_use_the_whole_server():
    jobs = labelled(PART.workload(1)[:200], tenant="A")
    alone, fcfs = (simulate(jobs, PART.config, PART.hardware, cls) for cls in (MODULE.MyScheduler, None))
    assert alone.seconds < 1.05 * fcfs.seconds, f"it takes {alone.seconds:.1f} s, and FCFS {fcfs.seconds:.1f} s"
