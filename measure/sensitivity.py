"""Which results depend on the machine? Studies and assignments again, on machines that differ.

    python -m measure.sensitivity --json tutorials/results/sensitivity.json

No GPU has been measured here, so what the chapters and assignments say of one must not depend on a
constant that is a guess. This runs each study of chapters 16 and 19, and each assignment with its
solution and all silly policies, on twelve machines: `overlap` 0, 0.5 and 1, with 0.3 and 3 ms of the
host per step, and with kernels that reach 0.3 and 0.6 of the FLOP/s.

A study *holds* if its answer is the same on all of them. An assignment holds if on all of them, and
on each seed, the solution gets at least 90 % of its goal points, and no silly policy half of them.
For an assignment, each machine is made as much faster or slower as it takes to serve the load in the
same time: its goals say seconds, and its rates are the ones that keep one machine busy.
"""

import itertools
import json
import os
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from measure.seeds import SILLY, Policy, measure_policy, points_of, policies_of
from nanovllm.routing import RoundRobin
from nanovllm.simulator import simulate
from nanovllm.simulator.machines import MACHINES, Machine
from tutorials.arguments import experiment, positive
from tutorials.assignments.task import NAMES, Part, Task, load_task, serve_baseline
from tutorials.machine import ROOT, environment
from tutorials.report import markdown, write_json
from tutorials.simulation.studies import STUDIES

OVERLAPS = (0.0, 0.5, 1.0)
HOST_SECONDS = (0.3e-3, 3e-3)
FLOPS_SHARES = (0.3, 0.6)
ENOUGH = 0.9  # of the goal points, for a solution
TOO_MUCH = 0.5  # for a silly policy
SOLUTIONS = ROOT / "tests" / "course" / "solutions"


def variants() -> dict[str, tuple[float, float, float]]:
    """Overlap, seconds of the host per step, and share of the FLOP/s; by a name."""
    return {
        f"overlap {overlap:g}, host {1e3 * host:g} ms, {share:g} of the FLOP/s": (
            overlap,
            host,
            share,
        )
        for overlap, host, share in itertools.product(OVERLAPS, HOST_SECONDS, FLOPS_SHARES)
    }


def changed(machine: str | Machine, overlap: float, host: float, share: float) -> Machine:
    base = MACHINES[machine] if isinstance(machine, str) else machine
    return replace(
        base,
        overlap=overlap,
        seconds_per_step=host,
        flops_share=share,
        attention_flops_share=share,
    )


# --- studies ---


def study_on(name: str, variant: tuple[float, float, float]) -> dict:
    """Its two numbers on a changed machine, and whether the answer is that of the chapter."""
    (study,) = (study for study in STUDIES if study.name == name)
    one, other = study.measure(changed("h100", *variant))
    return {"one": one, "other": other, "holds": study.says(one, other)}


# --- assignments ---


def on_machine(task: Task, variant: tuple[float, float, float]) -> Task:
    """The assignment on changed machines that serve its loads as fast, if all come at once. So its
    rates and its goals in seconds mean the same, and what differs is which steps take long."""
    parts = []
    for part in task.parts:
        machine = changed(part.hardware, *variant)
        factor = seconds_at_once(part, part.hardware) / seconds_at_once(part, machine)
        parts.append(replace(part, hardware=machine.slower(factor)))
    return replace(task, parts=parts)


def seconds_at_once(part: Part, machine: str | Machine) -> float:
    jobs = [job._replace(time=0.0) for job in part.workload(1)]
    return simulate(
        jobs, part.config, machine, replicas=part.replicas, router_cls=RoundRobin
    ).seconds


def paths_of(name: str) -> list[Path]:
    """In a0 nothing was tried: three classes are to be mended, and may not be empty."""
    tried = "a0_empty" if name == "a0" else f"{name}_tried"
    return [SILLY, SOLUTIONS / f"{tried}.py", SOLUTIONS / f"{name}_solution.py"]


def assignment_on(name: str, seeds: Sequence[int], variant: tuple[float, float, float]) -> dict:
    """The worst share of the goal points that the solution gets, the best of any silly policy, and
    its name."""
    task = on_machine(load_task(name), variant)
    total = sum(goal.points for goal in task.goals.values())
    worst = 1.0
    best_silly, name_of_best = 0.0, ""
    for seed in seeds:
        baselines = [serve_baseline(part, seed) for part in task.parts]
        for policy in relevant(task, name):
            values = measure_policy(task, policy, baselines, check=False, seed=seed)
            share = points_of(task, values) / total
            if policy.kind == "solution":
                worst = min(worst, share)
            elif share > best_silly:
                best_silly, name_of_best = share, policy.name
    holds = worst >= ENOUGH and best_silly < TOO_MUCH
    return {"solution": worst, "silly": best_silly, "by": name_of_best, "holds": holds}


def relevant(task: Task, name: str) -> Iterator[Policy]:
    """The solution and the silly ones."""
    for policy in policies_of(task, paths_of(name)):
        if policy.kind != "tried":
            yield policy


# --- all ---


def studies_on_all() -> dict:
    """In as many processes as there are processors, as below."""
    found = variants()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return {
            study.name: dict(zip(found, pool.map(partial(study_on, study.name), found.values())))
            for study in STUDIES
        }


def assignments_on_all(names: Sequence[str], seeds: Sequence[int]) -> dict:
    found = variants()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return {
            name: dict(zip(found, pool.map(partial(assignment_on, name, seeds), found.values())))
            for name in names
        }


def verdict(rows: dict[str, dict]) -> str:
    """In words: on which machines it does not hold."""
    wrong = [name for name, row in rows.items() if not row["holds"]]
    if not wrong:
        return "holds under all"
    return f"depends on the machine: not with {len(wrong)} of {len(rows)}, as {wrong[0]}"


def table(report: dict) -> str:
    lines = [["", "one / other", "says"]]
    for name, rows in report["studies"].items():
        ratios = sorted(row["one"] / row["other"] for row in rows.values() if row["other"])
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if ratios else "-"
        lines.append([name, spread, verdict(rows)])
    more = [["assignment", "solution, at least", "silly, at most", "says"]]
    for name, rows in report["assignments"].items():
        worst = min(row["solution"] for row in rows.values())
        best = max(rows.values(), key=lambda row: row["silly"])
        silly = f"{best['silly']:.0%} ({best['by']})" if best["by"] else "0%"
        more.append([name, f"{worst:.0%}", silly, verdict(rows)])
    return f"{markdown(lines)}\n\n{markdown(more)}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = experiment(
        __doc__, "write all numbers to this file; with names of assignments, all else in it stays"
    )
    known = [name for name in NAMES if name != "template"]
    parser.add_argument("names", nargs="*", help="of assignments (default: a0 to a9)")
    parser.add_argument("--count", type=positive, default=2, help="how many seeds (default: 2)")
    args = parser.parse_args(argv)
    unknown = {*args.names} - {*known}
    if unknown:
        parser.error(f"{min(unknown)!r} is not allowed: choose from {', '.join(known)}")
    names = args.names or known
    device = {"device": f"simulated, on {platform.machine()}"}
    report = environment() | device | {"studies": {}, "assignments": {}, "commits": {}}
    if args.names and args.json and args.json.exists():
        old = json.loads(args.json.read_bytes())
        report |= {key: old.get(key, {}) for key in ("studies", "assignments", "commits")}
    if not args.names:
        report["studies"] = studies_on_all()
    report["assignments"] |= assignments_on_all(names, range(1, args.count + 1))
    report["commits"] |= dict.fromkeys(names, report["commit"])
    print(table(report))
    write_json(report, args.json)


if __name__ == "__main__":
    main()
