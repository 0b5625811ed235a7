"""Public tests of assignment 8: is the router correct?

Run: SOLUTION=my_router.py pytest tutorials/assignments/a8
"""

from collections import Counter
from dataclasses import replace

from nanovllm import Router
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Request
from tutorials.assignments.public import class_of
from tutorials.assignments.public_tests import RuleTests, under_test
from tutorials.assignments.task import serve
from tutorials.simulation.workloads import fixed, labelled, poisson, shared_prefix

PART, MODULE = under_test(__file__)
MyRouter = class_of(MODULE, "MyRouter", Router)


class TestRules(RuleTests):
    part, module = PART, MODULE


def test_a_hot_document_does_not_make_one_replica_the_bottleneck():
    """30 questions per second about one document: a replica has seats for about 10 per second."""
    jobs = shared_prefix(poisson(rate=30), fixed(60, 100), 300, num_prefixes=1, prefix_tokens=2500)
    run = serve(replace(PART, workload=lambda seed: labelled(jobs, user=0)), MyRouter, seed=1)
    most = max(Counter(served.replica for served in run.requests).values())
    assert most < 150, f"one replica serves {most} of 300 questions"


def test_replicas_may_come_and_go():
    """`loads` says which there are."""
    router = MyRouter(16, 100)
    for i in range(60):
        names = [f"replica {k}" for k in range(1 + i % 5)]
        params = SamplingParams(extra_args={"user": i % 3})
        request = Request(str(i), None, [7] * 500 + [i] * 40, params, arrival_time=float(i))
        assert router.choose(request, {name: i % 4 for name in names}) in names
