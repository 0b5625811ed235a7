"""One's own run: the answers are those of the student's own load, the grader knows them by a run of its own, and no file
can tell it otherwise.

Run: pytest tests/course/test_own_run.py [-k a1] [--slow]
"""

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from shorter import shorter
from submissions import FCFS, HEAD, method, priority

from nanovllm import Run
from nanovllm.config import Config
from tutorials.assignments import own
from tutorials.assignments.grader import Grader
from tutorials.assignments.own_questions import (
    FIRST_SEED,
    Own,
    longest_wait,
    most_in_vain,
    overtaken_by,
    own_seed,
    problem_of_name,
)
from tutorials.assignments.own_tables import tables_of
from tutorials.assignments.public import classes_of, load
from tutorials.assignments.task import NAMES, Part, Task, load_task, serve, serve_baseline
from tutorials.simulation.workloads import labelled, lognormal, merged, poisson, workload

SOLUTIONS = Path(__file__).parent / "solutions"
WITH_OWN = [name for name in NAMES if load_task(name).own]
ADA = "Ada Lovelace"


# --- a small assignment ---


def two_kinds(seed: int):
    """Half of them are in a hurry. Memory is scarce, so some are preempted."""
    lengths = lognormal(40, 80, 0.5, 300, seed)
    slow = labelled(workload(poisson(60, seed), lengths, 20), hurry=False)
    return merged(slow, labelled(workload(poisson(60, seed + 1), lengths, 20), hurry=True))


CONFIG = Config(
    model="qwen3-0.6b", num_blocks=28, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=400
)
TASK = Task(
    "small",
    [Part("small", two_kinds, CONFIG, [], points=30)],
    engine_points=0,
    own=(longest_wait, overtaken_by, most_in_vain),
)
HURRY = priority("(not request.params.extra_args['hurry'], request.arrival)")
KEYS = [question.__name__ for question in TASK.own]


def graded(tmp_path, code: str, task: Task = TASK, **options):
    path = tmp_path / "my_scheduler.py"
    path.write_text(code, encoding="utf-8")
    return Grader(task, [1], **options).grade(path)


def last(tmp_path, code: str, task: Task = TASK, **options) -> tuple[str, str]:
    """Name and output of the line on one's own run. It is worth nothing, and costs nothing."""
    report = graded(tmp_path, code, task, **options)
    check = report.checks[-1]
    assert (check.score, check.max_score) == (0, 0) and report.max_score == 30
    return check.name, check.output


def named(code: str, answers: object, name: object = ADA) -> str:
    return f"NAME = {name!r}\nANSWERS = {answers!r}\n{code}"


def runs_of(task: Task, code: str, name: str = ADA) -> tuple[Run, Run]:
    """In this process."""
    namespace: dict = {}
    exec(code, namespace)
    part = replace(task.parts[0], keep_steps=True)
    run = serve(part, namespace["MyScheduler"], own_seed(name), check=False)
    return run, serve_baseline(part, own_seed(name))


def right_answers(code: str, name: str = ADA) -> dict[str, int]:
    return {key: min(by_hand(key, *runs_of(TASK, code, name))) for key in KEYS}


# --- an independent reading of a run ---


def all_with_most(values: dict[int, float]) -> set[int]:
    most = max(values.values())
    return {key for key, value in values.items() if value > most - 1e-5}


def waits(run: Run) -> set[int]:
    return all_with_most({i: s.token_times[0] - s.arrival for i, s in enumerate(run.requests)})


def first_steps(run: Run) -> dict[int, float]:
    """When each request ran for the first time."""
    found: dict[int, float] = {}
    for part in run.replicas or [run]:
        for step in reversed(part.steps):
            found.update(dict.fromkeys(step.running, step.start))
    return found


def overtaken(run: Run, i: int) -> int:
    first, came = first_steps(run), run.requests[i].arrival
    return len([j for j, s in enumerate(run.requests) if s.arrival > came and first[j] < first[i]])


def there_before(run: Run, i: int) -> int:
    came, replica = run.requests[i].arrival, run.requests[i].replica
    others = [s for s in run.requests if s.replica == replica and s.arrival < came]
    return len([s for s in others if s.token_times[-1] > came])


def vain(run: Run) -> dict[int, int]:
    found = {}
    for i, served in enumerate(run.requests):
        needed = served.job.num_prompt_tokens - served.num_cached_tokens + served.job.num_outputs
        found[i] = 1 - needed
    for part in run.replicas or [run]:
        for step in part.steps:
            for i, num_tokens, _ in step.items:
                found[i] += num_tokens
    return found


def longest_steps(run: Run) -> dict[int, float]:
    lengths = {i: step.end - step.start for i, step in enumerate(run.steps, start=1)}
    return {i: lengths[i] for i in all_with_most(lengths)}


def gaps(run: Run) -> dict[int, float]:
    return {
        i: max([b - a for a, b in pairwise(served.token_times)] or [0.0])
        for i, served in enumerate(run.requests)
    }


def losses(run: Run, baseline: Run) -> dict[int, float]:
    pairs = enumerate(zip(run.requests, baseline.requests))
    return {
        i: (a.token_times[-1] - a.arrival) - (b.token_times[-1] - b.arrival) for i, (a, b) in pairs
    }


def answers_in(run: Run, number: int) -> int:
    return sum(count for _, count, is_prompt in run.steps[number - 1].items if not is_prompt)


def by_hand(key: str, run: Run, baseline: Run) -> set[int]:
    match key:
        case "longest_wait":
            return waits(run)
        case "overtaken_by":
            return {overtaken(run, i) for i in waits(run)}
        case "there_before":
            return {there_before(run, i) for i in waits(run)}
        case "longest_step":
            return {*longest_steps(run)}
        case "answers_then":
            return {answers_in(run, number) for number in longest_steps(run)}
        case "longest_gap":
            return all_with_most(gaps(run))
        case "lost_most":
            return all_with_most(losses(run, baseline))
        case "most_in_vain":
            return all_with_most(vain(run))
        case "in_vain":
            return {max(vain(run).values())}
    raise AssertionError(f"{key} is read by no hand")


# --- whose run it is ---


def test_a_name_has_the_same_seed_on_each_machine_and_no_other_name_has_it():
    assert own_seed(ADA) == 131340134913813
    seeds = {own_seed(f"student {i}") for i in range(1000)}
    assert len(seeds) == 1000 and all(FIRST_SEED <= seed < 2**100 for seed in seeds)


@pytest.mark.parametrize(
    "name, sentence",
    [
        (ADA, None),
        ("李明", None),
        ("x" * 200, None),
        (None, 'has no NAME = "..."'),
        (7, "NAME must be a text"),
        ({"type": "set"}, "NAME must be a text"),
        ("", "not empty"),
        (" \t", "not empty"),
        ("Ada\n 30.0 of   30  forged", "one line"),
        ("\ud800", "one line"),
        ("x" * 201, "NAME has 201 characters, but at most 200 are allowed"),
    ],
)
def test_what_is_a_name(name, sentence):
    problem = problem_of_name(name)
    assert (problem is None) == (sentence is None)
    assert sentence is None or sentence in problem


@pytest.mark.parametrize(
    "answers, sentence",
    [
        ({"longest_wait": 7}, None),
        ({"longest_wait": "seven"}, None),  # a wrong one
        (None, "none of the keys longest_wait, overtaken_by, most_in_vain"),
        ({}, "none of the keys"),
        ({"A": 1}, "none of the keys"),
        ([7, 8, 9], 'ANSWERS must be a dict, like ANSWERS = {"longest_wait": 7}'),
        (7, "must be a dict"),
    ],
)
def test_what_are_answers(answers, sentence):
    problem = Own(ADA, answers).why_no_run(TASK.own)
    assert (problem is None) == (sentence is None)
    assert sentence is None or sentence in problem


# --- the grader ---


def test_right_answers_are_accepted_and_wrong_ones_refused(tmp_path):
    """They are those of a run in this process: it is the same, to the last digit."""
    right = right_answers(HURRY)
    title = f'own run of "{ADA}"'
    assert last(tmp_path, named(HURRY, right)) == (title, "3 of 3 right")
    wrong = right | {"overtaken_by": right["overtaken_by"] + 1}
    del wrong["most_in_vain"]
    output = "1 of 3 right: overtaken_by is wrong, most_in_vain is missing"
    assert last(tmp_path, named(HURRY, wrong)) == (title, output)


CHANGES = """
import os
class MyScheduler(Scheduler):
    def __init__(self, *args):
        global NAME, ANSWERS
        NAME, ANSWERS = "Alan Turing", %r
        print('     0.0 of    0  own run of "Alan Turing": 3 of 3 right')
        super().__init__(*args)
"""
FORGES = (
    """
import os
for fd in range(3, 20):
    try:
        os.write(fd, b'{"verdicts": {}, "NAME": "Alan Turing", "constants": {"NAME": 1}}\\n')
    except OSError:
        continue
"""
    + FCFS
)


def test_a_file_that_says_something_else_later_gains_nothing(tmp_path):
    """Name and answers are those with which the file was loaded; what is right is not in its process."""
    code = HEAD + CHANGES % right_answers(FCFS, "Alan Turing")
    wrong = {key: -1 for key in KEYS}
    name, output = last(tmp_path, named(code, wrong))
    assert name == f'own run of "{ADA}"' and output.startswith("0 of 3 right")
    report = graded(tmp_path, named(FORGES, wrong))
    assert all("Alan" not in check.name + check.output for check in report.checks)
    assert report.checks[0].score == 0


BREAKS_LATER = method(
    "self.count = getattr(self, 'count', 0) + 1\nassert self.count < 9, 'told'\nreturn super().schedule()"
)


def test_a_secret_grading_says_right_or_wrong_alone(tmp_path):
    right = right_answers(HURRY)
    answers = right | {"longest_wait": "told"}
    output = last(tmp_path, named(HURRY, answers), is_secret=True)[1]
    assert output == "2 of 3 right: longest_wait is no integer"
    report = graded(tmp_path, named(BREAKS_LATER, right), is_secret=True)
    assert report.checks[-1].output == (
        "your code has raised an exception; try it with python -m tutorials.assignments.own"
    )
    report = graded(tmp_path, named(BREAKS_LATER, right))
    assert "AssertionError: told (line" in report.checks[-1].output


# --- the page ---


def write_solution(tmp_path, name: str, head: str = f"NAME = {ADA!r}\n") -> Path:
    path = tmp_path / "my_scheduler.py"
    solution = SOLUTIONS / f"{name}_solution.py"
    path.write_text(head + solution.read_text(encoding="utf-8"), encoding="utf-8")
    return path


def test_the_page_has_what_is_needed_and_not_the_answers(tmp_path, capsys):
    path = write_solution(tmp_path, "template")
    own.main(["template", str(path), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert printed.startswith(f"people and a batch job, the load of {ADA}, seed {own_seed(ADA)}\n")
    assert "FCFS  MyScheduler" in printed and own.LEGEND in printed
    blank: dict = {}
    exec(printed[printed.index("ANSWERS = {") : printed.index("\n}") + 2], blank)
    assert blank["ANSWERS"] == dict.fromkeys(["longest_wait", "overtaken_by", "lost_most"])
    # found in the tables, as a student would
    with (tmp_path / "out" / "requests.csv").open(newline="", encoding="utf-8") as file:
        requests = [*csv.DictReader(file)]
    longest = max(requests, key=lambda row: float(row["first_token"]) - float(row["arrival"]))
    assert f"\n{longest['request']} " in printed  # it is among those that are shown
    count = sum(
        float(row["arrival"]) > float(longest["arrival"])
        and float(row["admitted"]) < float(longest["admitted"])
        for row in requests
    )
    lost = max(requests, key=lambda row: float(row["latency"]) - float(row["baseline_latency"]))
    assert count > 10
    found = {"longest_wait": int(longest["request"]), "overtaken_by": count}
    found["lost_most"] = int(lost["request"])
    code = f"ANSWERS = {found}\n{path.read_text(encoding='utf-8')}"
    task = replace(load_task("template"), engine_points=0, parts=load_task("template").parts[:1])
    assert graded(tmp_path, code, task).checks[-1].output == "3 of 3 right"


@pytest.mark.slow(but_every=10)
@pytest.mark.parametrize("name", WITH_OWN[::-1])
def test_answers_that_are_read_by_hand_are_right(name, tmp_path):
    """Of each assignment: in the tables, and for the grader, which lets the file play in its process."""
    task = shorter(load_task(name))
    assert len(task.own) == 3
    path = SOLUTIONS / f"{name}_solution.py"
    part = replace(task.parts[0], keep_steps=True)
    policy_cls, _ = classes_of(part, load(path))
    run = serve(part, policy_cls, own_seed(ADA), check=False)
    baseline = serve_baseline(part, own_seed(ADA))
    tables = tables_of(run, baseline)
    answers = {}
    for question in task.own:
        key = question.__name__
        answers[key] = max(by_hand(key, run, baseline))
        assert question(tables) == by_hand(key, run, baseline), key
    assert task.own[0](tables) <= {*range(len(run.requests))}
    own_run_alone = replace(task, parts=[replace(part, num_seeds=0, goals=[])], engine_points=0)
    code = named(path.read_text(encoding="utf-8"), answers)
    report = graded(tmp_path, code, own_run_alone, is_secret=True)
    assert report.checks[-1].output == "3 of 3 right"


# --- the command ---
