"""A run of the lab: a policy beside the baseline on the same jobs, as data for the page.

`tutorials.assignments.public` prints the same on a terminal. Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from nanovllm import Run
from nanovllm.scheduler import Scheduler
from nanovllm.topics.simulator.jobs import PlannedStep
from tutorials.assignments.public import check_rules, classes_of
from tutorials.assignments.task import Goal, Part, load_task, serve_baseline, shown
from tutorials.lab.film import NUM_FRAMES, Film, filmed
from tutorials.simulation.metrics import cells, is_finished, spans, states, summary, ttft

NUM_LINES = 40  # requests in the time line


@lru_cache(maxsize=6)
def baseline_of(name: str, index: int, seed: int) -> Run:
    """Of part `index` of an assignment."""
    return serve_baseline(replace(load_task(name).parts[index], keep_steps=True), seed)


def run_beside(part: Part, baseline: Run, module: Any, seed: int) -> tuple[Run, Film]:
    """The student's run, which is filmed. Raises ScheduleError, AssertionError, or what the file
    raises."""
    num_steps = max(one.num_steps for one in baseline.replicas or [baseline])
    film = Film(num_steps // NUM_FRAMES)
    part = replace(part, keep_steps=True)
    if part.router is not None:  # the replicas have schedulers of ours
        part = replace(part, config=replace(part.config, scheduler_cls=filmed(Scheduler, film)))
        return check_rules(part, module, seed, check=False), film
    policy_cls, manager_cls = classes_of(part, module)
    seen = SimpleNamespace(**{part.scheduler: filmed(policy_cls, film)})
    if manager_cls is not None:
        setattr(seen, part.block_manager, manager_cls)
    return check_rules(part, seen, seed, check=False), film


def results(part: Part, baseline: Run, run: Run, film: Film) -> dict[str, Any]:
    """What the page shows of it."""
    runs = {part.baseline: baseline, part.policy[0]: run}
    where = " of one replica" if part.router is not None else ""
    return {
        "table": cells({name: summary(one) for name, one in runs.items()}),
        "goals": [goal_of(goal, goal.measure(run, baseline)) for goal in part.goals],
        "film": film.run(f"The blocks{where} under {part.policy[0]}"),
        **time_lines(runs),
    }


def goal_of(goal: Goal, value: float) -> dict[str, Any]:
    points = {"score": goal.score(value), "most": goal.points}
    return {"name": goal.name, "value": shown(value, ".3f"), "wanted": goal.wanted} | points


# --- the time line ---


def time_lines(runs: dict[str, Run]) -> dict[str, Any]:
    """Of the same requests in all runs: one after the other in the order of arrival, those that wait
    longest for their first tokens, in all runs together."""
    first, order = where_most_wait([*runs.values()])
    chosen = order[first : first + NUM_LINES]
    lines = [{"name": name, "lines": [*time_line(run, chosen)]} for name, run in runs.items()]
    return {"lines": lines, "first": first, "count": len(order)}


def where_most_wait(runs: list[Run]) -> tuple[int, list[int]]:
    """Where they start in the order of arrival, and this order."""
    order = sorted(range(len(runs[0].requests)), key=lambda i: runs[0].requests[i].arrival)
    waits = [sum(ttft(run.requests[i]) or 0.0 for run in runs) for i in order]
    first = range(max(1, len(order) - NUM_LINES + 1))
    return max(first, key=lambda k: sum(waits[k : k + NUM_LINES])), order


def time_line(run: Run, order: list[int]) -> Iterator[dict[str, Any]]:
    """A line for each of these requests: spans of (state, begin, end), in seconds. The states are
    those of `metrics.states`."""
    rows = dict[int, tuple[str, list[PlannedStep]]]()
    for index, replica in enumerate(run.replicas or [run]):
        chosen = [i for i in order if run.requests[i].replica == index]
        if chosen:
            steps = steps_of(run, chosen, replica.steps)
            rows |= {i: (row, steps) for i, row in rows_of(run, chosen, steps).items()}
    for i in order:
        ends = [[state, round(a, 4), round(b, 4)] for state, a, b in spans(*rows[i])]
        yield {"request": i, "spans": ends}


def steps_of(run: Run, chosen: list[int], steps: list[PlannedStep]) -> list[PlannedStep]:
    """The steps until all of the chosen requests have ended, with nothing else in them. The requests
    are counted anew."""
    place = {i: k for k, i in enumerate(chosen)}
    requests = [run.requests[i] for i in chosen]
    end = max((r.token_times[-1] if is_finished(r) else run.seconds) for r in requests)
    return [
        PlannedStep(
            step.start,
            step.end,
            [(place[i], count, is_prompt) for i, count, is_prompt in step.items if i in place],
            [place[i] for i in step.running if i in place],
        )
        for step in steps
        if step.start < end
    ]


def rows_of(run: Run, chosen: list[int], steps: list[PlannedStep]) -> dict[int, str]:
    some = Run([run.requests[i] for i in chosen], steps=steps)
    return {chosen[k]: row for k, row in states(some).items()}
