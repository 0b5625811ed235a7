"""The commands beside the grader: `seeds` (many seeds and policies as one table) and `public` (a student's scheduler
beside FCFS, with a picture).

Run: pytest tests/course/test_lab_commands.py [-k picture]
"""

import json
from itertools import islice

import pytest
from submissions import FCFS, SHORTEST_FIRST, method, priority

from nanovllm import Job
from nanovllm.config import Config
from tests.tools.extras import needs
from tutorials.assignments import alike, public, seeds
from tutorials.assignments.a1.task import latency_share, wait
from tutorials.assignments.task import NAMES, Goal, Part, Task, load_task
from tutorials.lab.runs import goal_of
from tutorials.simulation.workloads import all_at_once, fixed, predicted, workload

ENDS_EARLY = method("return 'length'", "reason_to_end", ", seq")
OVER_BUDGET = method("return 10**6, 10**6", "step_budget")
CONFIG = Config(
    model="qwen3-0.6b",
    num_blocks=300,
    max_model_len=4096,
    max_num_seqs=2,
    max_num_batched_tokens=128,
)


def jobs(seed: int) -> list[Job]:
    """Half of them are long, and stand in front."""
    lengths = [*islice(fixed(100, 100 + seed), 4), *islice(fixed(100, 5), 4)]
    return predicted(workload(all_at_once(), lengths, 8), sigma=0)


GOAL = Goal("mean latency / that of FCFS", latency_share, none=1.0, full=0.8, points=70)
TASK = Task("small", [Part("small", jobs, CONFIG, [GOAL], points=20)])


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "my_scheduler.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_a_value_that_does_not_count_is_shown_as_it_was_measured(write):
    """In the lab, on the command line, and by the grader: FCFS has the mean latency of FCFS."""
    part = load_task("a1").parts[1]
    (goal,) = part.goals
    runs = public.serve_both(part, public.load(write(FCFS)), 7)
    value = goal.measure(runs["FCFS"], runs["FCFS"])
    longest = max(map(wait, runs["FCFS"].requests))
    why = f"{longest:.3f}, does not count: mean latency 1.000 of FCFS, must be below 0.85"
    assert goal.score(value) == 0 and value == 13.5 and longest < 13.5
    assert goal_of(goal, value)["value"] == why
    assert f"{why}, 0 of 40 points" in public.compare(part, runs)
    worst = goal.worst([9.0, value])
    assert goal.sentence(worst, 2).startswith(f"{why}, the worst of 2; full points at 12")


BROKEN = {
    "KeyError: 'guess' (line 4 of the file)": priority("request.params.extra_args['guess']"),
    "ZeroDivisionError: division by zero (line 1 of the file)": "1 / 0",
    "SystemExit: no (line 2 of the file)": "import sys\nsys.exit('no')",
    "there is no class MyScheduler that is a subclass of Scheduler": "x = 1",
    "AssertionError: request 0 has got 1 of 101 tokens": ENDS_EARLY,
    "the schedule has 200 tokens": OVER_BUDGET,
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_a_file_that_breaks_is_a_row_that_says_so(sentence, write):
    paths = [write(BROKEN[sentence]), write(SHORTEST_FIRST, "good.py")]
    measured = seeds.measure_seed(TASK, paths, check=sentence.startswith("the s"), seed=1)
    assert sentence.strip() in measured["my_scheduler"]
    assert "\n" not in measured["my_scheduler"]
    assert measured["good"]["small, mean latency / that of FCFS"] < 1
    header, fcfs, broken, good = seeds.table(TASK, {name: [v] for name, v in measured.items()})
    assert fcfs == ["FCFS", "1", "0"]
    assert broken == ["my_scheduler", "broken", "0 (broken on 1 of 1 seeds)"]


def test_seeds_prints_a_table_and_writes_all_values(write, tmp_path, capsys):
    result = tmp_path / "out.json"
    good = write("from nanovllm.scheduler import Scheduler as MyScheduler\n", "good.py")
    broken = write("print('loud')\nraise ValueError('it\\nbreaks')\n", "broken.py")
    argv = ["template", str(good), str(broken), "--first", "5", "--count", "2"]
    seeds.main([*argv, "--json", str(result)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["Scheduler", "FCFS", "good", "broken", "broken,"]
    assert lines[2].split()[1:] == ["1", "2.2", "0"]
    assert lines[4] == "broken, seed 5: ValueError: it breaks (line 2 of the file)"
    report = json.loads(result.read_bytes())
    assert report["task"] == "template"
    assert report["seeds"] == [5, 6] and report["silly"] == ["FCFS"]
    assert report["rows"]["good"] == report["rows"]["FCFS"]


# --- public ---


def test_public_shows_a_scheduler_beside_fcfs(write, capsys):
    public.main(["template", str(write(FCFS)), "7"])
    printed = capsys.readouterr().out
    assert printed.startswith("people and a batch job, seed 7\n")
    assert "FCFS  MyScheduler" in printed
    goals = printed.splitlines()[-2:]
    assert goals[0].startswith("mean wait of people / that under FCFS: 1.000, 0 of 40 points")
    assert goals[1].startswith("longest wait of all / that under FCFS: 2.200, 0 of 30 points")


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["a1", "good.py", "seven"], "'seven' is not allowed: it must be an integer, 0 or more"),
        (["a1", "empty.py"], "there is no class MyScheduler that is a subclass of Scheduler"),
        (["a1", "good.py", "--requests", "9:9"], "'9:9' is not allowed"),
        (["a1", "good.py", "--gantt", "x.png", "--requests", "900:905"], "only 500 requests"),
        (["a1", "good.py", "--gantt", "run.doc"], "must be a .png in a folder"),
    ],
)
def test_public_refuses_bad_input_in_a_sentence(argv, sentence, write, capsys, monkeypatch):
    write("", "empty.py")
    write("MyScheduler = int\n", "other.py")
    monkeypatch.chdir(write(FCFS, "good.py").parent)
    monkeypatch.setattr(public, "find_spec", lambda name: name)  # as if matplotlib were there
    with pytest.raises(SystemExit) as refused:
        public.main(argv)
    assert refused.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_public_draws_a_picture(write, tmp_path, capsys):
    needs("matplotlib")
    path = tmp_path / "run.png"
    public.main(["template", str(write(FCFS)), "--gantt", str(path), "--requests", "5"])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith(f"\ndrawn: {path}\n")


@pytest.mark.parametrize("name", NAMES)
def test_the_prompts_of_the_real_engine_have_all_labels_of_the_load(name):
    """Otherwise a new label would be a KeyError there."""
    for part in load_task(name).parts:
        labels = {key for params in public.new_params(part) for key in params.extra_args}
        assert labels == {key for job in part.workload(3) for key in job.extra_args}


# --- alike ---


def test_a_copy_with_other_names_and_numbers_is_alike(write, tmp_path, capsys):
    copied = SHORTEST_FIRST.replace("request", "one").replace(", ", ",") + "# my own idea\n"
    for name, text in {
        "one": SHORTEST_FIRST,
        "two": copied,
        "three": ENDS_EARLY,
        "four": "(",
    }.items():
        write(text, f"submissions/{name}.py")
    alike.main([f"{tmp_path / 'submissions'}"])
    assert capsys.readouterr().out.splitlines()[:1] == ["100%  one.py  two.py"]
    assert all(
        path.name != "three.py"
        for pair in alike.pairs_of([*tmp_path.glob("*/*.py")])
        for path in pair[1:]
    )
