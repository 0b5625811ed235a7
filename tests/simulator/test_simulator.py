"""The simulator: the clock, the cost of a step, what is measured of each request, and what it says of broken schedulers.

Run: pytest tests/simulator/test_simulator.py [-k swap]
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanovllm import Job, simulate
from nanovllm.config import Config
from nanovllm.schedule import ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.topics.simulator.cost_model import HARDWARE, SHAPES, shape_of, work_of
from nanovllm.topics.simulator.machines import MACHINES, Machine
from tutorials.baselines.contiguous import OrcaOracle
from tutorials.baselines.static_batching import StaticBatching
from tutorials.simulation.metrics import summary
from tutorials.simulation.workloads import (
    fixed,
    multi_turn,
    poisson,
    shared_prefix,
    sharegpt,
    workload,
)

ROOT = Path(__file__).parents[2]
H100 = MACHINES["h100"]
SECOND = replace(
    H100,
    hardware=H100.hardware._replace(bytes_per_second=1e30, flops_per_second=1e30),
    seconds_per_step=1.0,
    seconds_per_sequence=0.0,
    seconds_per_layer=0.0,
)
SMALL = {
    "model": "qwen3-0.6b",
    "num_blocks": 64,
    "block_size": 16,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
}


def job(time=0.0, prompt=10, outputs=3, token=1, **fields) -> Job:
    return Job(
        time,
        ((token, prompt),),
        outputs,
        answer=1000 + token,
        max_tokens=max(outputs, 100),
        **fields,
    )


def times(run) -> list[list[float]]:
    return [list(served.token_times) for served in run.requests]


def test_no_torch():
    """Also not for running it, nor for the workloads and the metrics."""
    code = "import sys; from nanovllm import simulate; from tutorials.simulation.metrics import summary, table; "
    code += "from tutorials.simulation.workloads import poisson, sharegpt, workload; "
    code += "print(table({'a': summary(simulate(workload(poisson(5), sharegpt(), 20)))})); "
    code += "assert not {'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_every_token_comes_at_the_end_of_its_step():
    """Steps of one second. The second request arrives in the middle of one, the third when all is quiet."""
    jobs = [job(0, 10, 3, token=1), job(0.5, 70, 2, token=2), job(10.25, 5, 1, token=3)]
    run = simulate(jobs, Config(**SMALL), SECOND, keep_steps=True)
    assert times(run) == [[1, 2, 3], [3, 4], [11.25]]  # 70 tokens need two steps of 64
    assert [served.arrival for served in run.requests] == [0, 0.5, 10.25]
    assert run.seconds == 11.25 and run.busy_seconds == 5 and run.num_steps == 5
    assert run.num_computed_tokens == 10 + 2 + 70 + 1 + 5 and run.num_prompt_tokens == 85
    assert [step.items for step in run.steps] == [
        [(0, 10, True)],
        [(0, 1, False), (1, 63, True)],
        [(0, 1, False), (1, 7, True)],
        [(1, 1, False)],
        [(2, 5, True)],
    ]
    assert [step.start for step in run.steps] == [0, 1, 2, 3, 10.25]


def test_the_clock_of_the_scheduler():
    seen = []

    class Looks(Scheduler):
        def make_room(self, schedule):
            seen.append((self.clock(), [request.arrival_time for request in self.unfinished()]))

    simulate([job(0.5, outputs=2), job(1.25, outputs=1, token=2)], Config(**SMALL), SECOND, Looks)
    assert seen == [(0.5, [0.5]), (1.5, [0.5, 1.25])]


def test_the_scheduler_does_not_see_the_true_length():
    class Looks(Scheduler):
        def priority(self, request):
            assert request.params.max_tokens == 100
            assert request.params.extra_args == {"tenant": "a"}
            return request.arrival

    run = simulate([job(outputs=7, extra_args={"tenant": "a"})], Config(**SMALL), SECOND, Looks)
    assert len(run.requests[0].token_times) == 7


def test_the_cost_of_a_step_by_hand():
    """Qwen3-8B on an H100: a decode reads the weights, a prompt of 4,096 tokens is bound by arithmetic."""
    shape = shape_of(SHAPES["qwen3-8b"], itemsize=2)
    run = simulate([job(0, 4096, 2)], Config(model="Qwen/Qwen3-8B", max_num_batched_tokens=8192))
    prompt, decode = work_of(shape, [(4096, 4096)], 1), work_of(shape, [(1, 4097)], 1)
    others = 2.7e-4 + 3.9e-6 + 36 * 1e-5  # the host, and the launches of each layer
    first = prompt.flops / (989e12 * 0.6) + others
    assert times(run)[0] == pytest.approx([first, first + decode.bytes / (3.35e12 * 0.8) + others])
    assert prompt.flops / 989e12 > prompt.bytes / 3.35e12
    assert first == pytest.approx(0.1049, rel=0.001)


def test_swapped_blocks_and_sequences_cost_time():
    jobs = [job(0, 60, 100, token=i) for i in range(1, 5)]
    config = {**SMALL, "num_blocks": 20, "max_num_batched_tokens": 512}
    swap = simulate(jobs, Config(**config, preemption_mode="swap"), SECOND, check=True)
    recompute = simulate(jobs, Config(**config), SECOND, check=True)
    assert swap.num_swapped_blocks > 0
    assert recompute.num_swapped_blocks == 0 < recompute.num_preemptions
    assert swap.num_computed_tokens < recompute.num_computed_tokens
    shape = shape_of(SHAPES["qwen3-0.6b"], itemsize=2)
    # out and in; the prefix cache spares some of it
    bus = 2 * swap.num_swapped_blocks * 16 * shape.kv_bytes / 25e9
    assert 0.5 * bus < swap.busy_seconds - swap.num_steps <= bus * 1.001
    slower = replace(SECOND, seconds_per_sequence=0.25)
    plain, per_sequence = (simulate(jobs, Config(**SMALL), one) for one in (SECOND, slower))
    assert per_sequence.busy_seconds > plain.busy_seconds + 0.25 * 4 * 99


def test_the_next_turn_of_a_conversation_comes_after_the_answer():
    """It begins with what was said before, which is in the cache."""
    first = job(0, 40, 8)
    second = Job(2.0, (*first.conversation, (7, 20)), 2, answer=9, max_tokens=10, after=0)
    run = simulate([first, second], Config(**SMALL), SECOND, check=True)
    assert times(run) == [[1, 2, 3, 4, 5, 6, 7, 8], [11, 12]] and run.requests[1].arrival == 10
    # of 47; the last was never computed
    assert run.requests[1].num_cached_tokens == 32 and run.num_cached_tokens == 32


def test_preemptions_are_counted_per_request():
    jobs = [job(0, 40, 60, token=i) for i in range(1, 5)]
    run = simulate(jobs, Config(**{**SMALL, "num_blocks": 16}), SECOND, check=True)
    counts = [served.num_preemptions for served in run.requests]
    assert sum(counts) == run.num_preemptions > 0 and counts[0] == 0
    assert all(len(served.token_times) == 60 for served in run.requests)


def test_kv_use():
    """Two of four blocks for one second, then three for two seconds."""
    config = Config(**{**SMALL, "num_blocks": 9, "max_model_len": 64})
    run = simulate([job(0, 32, 3)], config, SECOND)
    assert run.kv_use == pytest.approx((2 * 1 + 3 * 2) / 3 / 9)


def test_no_jobs():
    run = simulate([])
    assert run.num_steps == run.seconds == run.kv_use == 0 and summary(run)["requests"] == 0


def test_the_same_every_time():
    jobs = multi_turn(poisson(2, seed=3), fixed(30, 20), 10, max_model_len=512)
    first, second = (simulate(jobs, Config(**SMALL), check=check) for check in (False, True))
    assert first == second and first.num_cached_tokens > 0


@pytest.mark.parametrize(
    "options", [{}, {"scheduler_cls": StaticBatching}, {"block_manager_cls": OrcaOracle}]
)
def test_all_jobs_get_all_their_tokens(options):
    if "block_manager_cls" in options:
        options = options | {"enable_prefix_caching": False}
    jobs = workload(poisson(5, seed=1), sharegpt(512, seed=1), 60)
    jobs = [job._replace(max_tokens=job.num_outputs + 1) for job in jobs]
    config = Config(**{**SMALL, "num_blocks": 200, "max_num_batched_tokens": 512}, **options)
    run = simulate(jobs, config, check=True)
    assert [len(served.token_times) for served in run.requests] == [job.num_outputs for job in jobs]
    assert run.kv_use < 1 and summary(run)["unfinished"] == 0


def test_blocks_fill_the_memory():
    config = Config(model="qwen3-8b")
    jobs = shared_prefix(poisson(5), sharegpt(), 20)
    assert 0 < simulate(jobs, config, "rtx4090").kv_use < 1
    small = Machine(HARDWARE["rtx4090"]._replace(name="small", memory_bytes=8e9))
    message = "model='qwen3-8b' does not fit on small: the weights take 16,381,470,720 of 7,"
    with pytest.raises(ValueError, match=message):
        simulate([], config, small)


NO = "is not allowed: it must be"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"hardware": "h1000"}, f"hardware='h1000' {NO} one of h100, h200, a100, rtx4090, cpu"),
        (
            {"config": Config(model="no/such")},
            f"model='no/such' {NO} a directory or one of qwen3-0.6b",
        ),
        (
            {"jobs": [job(prompt=600)]},
            f"job 0: num_outputs=3 {NO} from 1 to -88, by max_tokens and max_model_len=512",
        ),
        ({"jobs": [job(prompt=0)]}, rf"job 0: prompt=\(\(1, 0\),\) {NO} at least one token"),
        ({"jobs": [job(after=1), job()]}, f"job 0: after=1 {NO} None or the index of an earlier"),
    ],
)
def test_what_cannot_run(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate(**{"jobs": [job()], "config": Config(**SMALL)} | arguments)


# --- schedulers that change answers. What they lose: tests/course/test_find_the_bug.py ---


class EndsEarly(Scheduler):
    def reason_to_end(self, seq):
        return super().reason_to_end(seq) or ("stop" if seq.num_output_tokens > 2 else None)


class Mutates(Scheduler):
    def add(self, request):
        super().add(request)
        request.max_len = len(request.prompt_token_ids) + 2


class EndsLate(Scheduler):
    def reason_to_end(self, seq):
        return None


@pytest.mark.parametrize(
    "scheduler, message",
    [
        (EndsEarly, r"update\(\): Request\(\d\) has ended after 3 of 9 tokens"),
        (Mutates, r"update\(\): Request\(\d\) has ended after 2 of 9 tokens"),
        (EndsLate, r"update\(\): Request\(\d\) has not ended after 9 of 9 tokens"),
    ],
)
def test_answers_are_those_that_were_given(scheduler, message):
    """Not the answers that the scheduler says."""
    jobs = [Job(0.0, ((i, 30),), 9) for i in range(1, 9)]
    config = Config(**{**SMALL, "num_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4})
    with pytest.raises(ScheduleError, match=f"^step .*{message}"):
        simulate(jobs, config, SECOND, scheduler, check=True)


# --- guesses ---


GUESSING = SMALL | {"speculative_config": {"num_speculative_tokens": 4}}


@pytest.mark.parametrize(
    "right, steps",
    [
        ((), 20),
        ((-1,) * 20, 20),
        ((0,) * 20, 20),
        ((2,) * 20, 7),
        ((9,) * 20, 4),
        ((4, -1, -1, -1, -1, 0) * 4, 7),
    ],
)
def test_a_job_says_how_many_guesses_are_right(right, steps):
    jobs = [job(outputs=20, right_draft_tokens=right)]
    (served,) = simulate(jobs, Config(**GUESSING), SECOND, check=True).requests
    assert len(served.token_times) == 20
    assert len({*served.token_times}) == steps
