"""Figure 12: the systems come in the paper's order, at a small scale; what is whole stays whole;
tables and picture.

Run: pytest tests/tutorials/test_figure12.py [-k order]
"""

import math

import pytest

from nanovllm.config import Config
from nanovllm.simulator import simulate
from nanovllm.simulator.cost_model import shape_of
from nanovllm.simulator.replica import model_config
from tests.tools.extras import needs
from tutorials.baselines.replay import NUM_SLOTS
from tutorials.measure.ablations import CACHE, ablation, ablation_table, documents, watermarks
from tutorials.measure.figure12 import LIMITS, PAPER_BATCH, Curve, batch_table, rates_table
from tutorials.measure.loads import Load, PromptsFirst, WholePrompts, chats, run, systems
from tutorials.simulation.workloads import all_at_once, fixed, poisson, sharegpt, workload


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Load:
    """60 chats."""
    full = chats(tmp_path_factory.mktemp("opt-13b"), minutes=1)
    return Load(
        lambda rate: workload(poisson(rate), sharegpt(), 60), full.machine, full.options, lowest=0.1
    )


def test_a_token_takes_as_much_memory_as_in_the_paper(load):
    shape = shape_of(model_config(load.options["model"]), itemsize=2)
    assert shape.kv_bytes == 800 * 1024
    assert shape.weight_bytes / 2 == pytest.approx(13e9, rel=0.02)


@pytest.mark.slow
def test_the_systems_come_in_the_papers_order(load):
    """60 requests never make a queue of a second per token, so the limit is a smaller one."""
    rates = {
        name: Curve(load, system).sustained(0.05, tolerance=0.2)
        for name, system in systems(2048, NUM_SLOTS).items()
    }
    paged, oracle, pow2, most, static, _ = rates.values()
    assert paged > oracle >= pow2 >= most > static


def test_more_requests_run_together_in_the_papers_order(load):
    """All are there from the start: then memory is what limits each system."""
    jobs = [job._replace(time=0.0) for job in load.jobs(1.0)]
    all_systems, steps = systems(2048, NUM_SLOTS), {}
    for name in PAPER_BATCH:
        steps[name] = run(jobs, load.machine, load.options | all_systems[name]).num_steps
    assert steps["Orca (Max)"] > steps["Orca (Pow2)"] > steps["Orca (Oracle)"] > steps["paged"]


@pytest.mark.slow
def test_what_is_sustained_lies_between_two_points(load):
    curve = Curve(load, {})
    rate = curve.sustained(0.03)
    below = [point["latency"] for at, point in curve.points.items() if at < rate]
    above = [point["latency"] for at, point in curve.points.items() if at > rate]
    assert max(below) < 0.03 <= min(above)
    assert curve.sustained(100.0) == math.inf


@pytest.mark.parametrize("scheduler_cls", [WholePrompts, PromptsFirst])
def test_prompts_are_computed_whole(scheduler_cls, load):
    jobs = workload(poisson(4.0), fixed(700, 20), 30)
    served = simulate(
        jobs, Config(**load.options), load.machine, scheduler_cls, check=True, keep_steps=True
    )
    chunks = [
        (n, len(step.items)) for step in served.steps for _, n, is_prompt in step.items if is_prompt
    ]
    assert [n for n, _ in chunks] == [700] * 30
    for step in served.steps:
        kinds = {is_prompt for _, _, is_prompt in step.items}
        assert scheduler_cls is WholePrompts or len(kinds) == 1


def test_ablations_have_a_table():
    load = documents(minutes=1)
    load.jobs = lambda rate, jobs=load.jobs: jobs(rate)[:40]
    rows = ablation(load, CACHE, 20.0)
    assert rows["prefix cache"]["latency"] < rows["no prefix cache"]["latency"]
    assert len(ablation_table(rows).splitlines()) == 4


def test_a_watermark_avoids_preemption(load):
    rows = watermarks(load, workload(all_at_once(), sharegpt(), 150), with_cache=False)
    assert rows["0%"]["preemptions"] > rows["10%"]["preemptions"]
    assert rows["0%"]["again"] > rows["10%"]["again"] >= 0


def made_up(rate: float) -> dict:
    points = [
        {"rate": rate * i, "requests": 60, "latency": i / 4, "batch": 7.0 * i} for i in (1, 2, 4)
    ]
    return {"sustained": {str(limit): rate * limit for limit in LIMITS}, "points": points}


def test_tables_and_picture(tmp_path):
    results = {
        name: made_up(rate)
        for name, rate in zip(systems(2048, NUM_SLOTS), (3.0, 2.0, 1.5, 1.0, 0.5, 2.9))
    }
    rows = rates_table(results, paper=True).splitlines()
    assert rows[2:4] == [
        "| paged | 3.00 | 0.60 | 1.0 times |  |",
        "| Orca (Oracle) | 2.00 | 0.40 | 1.5 times | 1.7 to 2.7 times |",
    ]
    assert batch_table(results).splitlines()[2] == "| Orca (Max) | 14.0 | 28.0 | 7.0 |"
    needs("matplotlib")
    from tutorials.figures.plot_figure12 import draw

    figure = draw({"figure12": {"chats": results, "others": results}})
    assert [len(axes.lines) for axes in figure.axes] == [6, 6]
