"""The leaderboard: a line for each name, the best first, and none for a scheduler that breaks a rule.

Run: pytest tests/course/test_leaderboard.py
"""

from datetime import date
from itertools import islice

import pytest
from submissions import FCFS, SHORTEST_FIRST, method

from nanovllm.config import Config
from tutorials.assignments import grade, leaderboard
from tutorials.assignments.task import Goal, Part, Task, mean_latency
from tutorials.simulation.workloads import all_at_once, fixed, predicted, workload

CONFIG = Config(model="qwen3-0.6b", num_blocks=300, max_model_len=4096, max_num_seqs=2)
LONGEST_FIRST = SHORTEST_FIRST.replace("return ", "return -")
SERVES_NONE = method("return None", "next_waiting")


def jobs(seed: int):
    """Half of them are long, and stand in front."""
    lengths = [*islice(fixed(20, 100), 4), *islice(fixed(20, 5 + seed % 5), 4)]
    return predicted(workload(all_at_once(), lengths, len(lengths)), sigma=0.0)


def speed(run, baseline) -> float:
    return mean_latency(baseline) / mean_latency(run)


GOALS = [
    Goal("speed / that of FCFS", speed, none=1.0, full=1.2, points=60),
    Goal("seconds", lambda run, baseline: run.seconds, none=2.0, full=1.0, points=30),
]


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Where the leaderboard of a tiny task is written."""
    task = Task("tiny", [Part("load", jobs, CONFIG, GOALS, points=10)], engine_points=0)
    monkeypatch.setattr(grade, "load_task", lambda name: task)
    monkeypatch.setattr(leaderboard, "PAGE", tmp_path / "LEADERBOARD.md")
    return tmp_path / "LEADERBOARD.md"


def enter(page, name: str, code: str, *options: str) -> list[list[str]]:
    """The lines of the table after this file was graded."""
    path = page.with_name("my_scheduler.py")
    path.write_text(code)
    leaderboard.main([str(path), "--name", name, *options])
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.slow
def test_the_best_is_first_and_a_name_has_one_line(page, capsys):
    enter(page, "FCFS", FCFS)
    enter(page, "Maya", LONGEST_FIRST)
    heading, _, first, second = enter(page, "Maya", SHORTEST_FIRST)
    assert heading == ["rank", "name", "speed / that of FCFS", "seconds", "date", "verified"]
    assert first[:2] == ["1", "Maya"] and float(first[2]) > 1.1
    assert second[:3] == ["2", "FCFS", "1"] and second[4:] == [
        date.today().isoformat(),
        "public seeds",
    ]
    assert "of  100  in all" in capsys.readouterr().out


@pytest.mark.slow
def test_only_the_secret_makes_a_line_verified(page):
    secret = page.with_name("secret.txt")
    secret.write_text("a long enough secret\n")
    secret.chmod(0o600)
    enter(page, "FCFS", FCFS)
    *_, first, second = enter(page, "Maya", SHORTEST_FIRST, "--secret", str(secret))
    assert (first[-1], second[-1]) == ("yes", "public seeds")


def test_who_breaks_a_rule_gets_no_line(page):
    enter(page, "FCFS", FCFS)
    before = page.read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="'Otto' gets no line.*planned nothing"):
        enter(page, "Otto", SERVES_NONE)
    assert page.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("name", ("", "a|b", "a\nb"))
def test_a_name_must_fit_into_a_table(page, name, capsys):
    with pytest.raises(SystemExit):
        enter(page, name, FCFS)
    assert "it must be one line" in capsys.readouterr().err and not page.exists()
