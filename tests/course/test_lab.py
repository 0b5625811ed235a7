"""What the lab runs in the browser, as plain Python: runs beside the baseline, public tests, points, sheets, and what is
said of a file that fails.

Run: pytest tests/course/test_lab.py [-k sheet]
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from submissions import SHORTEST_FIRST

from nanovllm.scheduler import Scheduler
from tutorials.assignments.task import load_task, serve
from tutorials.lab import build
from tutorials.lab.film import Film, filmed
from tutorials.lab.public_tests import public_tests, stand_in
from tutorials.lab.runs import NUM_LINES
from tutorials.lab.session import Session
from tutorials.lab.sheets import SHEETS

ROOT = Path(__file__).parents[2]
SOLUTIONS = ROOT / "tests" / "course" / "solutions"
RUNS = ROOT / "nanovllm" / "topics" / "server" / "page" / "runs"


@pytest.fixture
def ask(tmp_path):
    """Asks as the page does; all answers but the last one, which says what was printed."""

    def ask(**question) -> list[dict]:
        texts = [*Session(tmp_path).texts(json.dumps(question))]
        *answers, last = map(json.loads, texts)
        assert last["done"]
        ask.printed = last["printed"]
        return answers

    return ask


def starter(name: str) -> str:
    return (ROOT / "tutorials" / "assignments" / name / "starter.py").read_text(encoding="utf-8")


# --- a run ---


def test_a_run_stands_beside_the_baseline(ask):
    (answer,) = ask(do="run", task="a1", part=0, seed=2, source=SHORTEST_FIRST)
    assert answer["table"][0] == ["", "FCFS", "MyScheduler"]
    assert ["requests", "500", "500"] in answer["table"]
    (goal,) = answer["goals"]
    assert goal["name"] == "mean latency / that of FCFS" and float(goal["value"]) < 0.6
    assert goal["score"] == goal["most"] == 30
    assert [one["name"] for one in answer["lines"]] == ["FCFS", "MyScheduler"]
    fcfs, own = (one["lines"] for one in answer["lines"])
    drawn = [line["request"] for line in own]
    assert drawn == [line["request"] for line in fcfs] and answer["count"] == 500
    assert drawn == [*range(drawn[0], drawn[0] + NUM_LINES)]
    waits = [until - begin for line in fcfs for state, begin, until in line["spans"][:1]]
    assert min(waits) > 3  # the first 40 of 500 do not wait
    json.dumps(answer, allow_nan=False)  # a browser reads no NaN


def test_a_film_is_a_recorded_run():
    """It has the fields of those that the page of the server plays, covers all steps, and each request is in it as it is."""
    part = load_task("a4").parts[0]
    film = Film(10)
    run = serve(part, filmed(Scheduler, film), 1, check=False)
    played = film.run("a title")
    recorded = json.loads((RUNS / "preemption_swap.json").read_bytes())
    assert played.keys() == recorded.keys()
    assert all(frame.keys() == recorded["frames"][0].keys() for frame in played["frames"])
    assert sum(frame["steps"] for frame in played["frames"]) == run.num_steps
    assert played["frames"][-1]["preemptions"] == run.num_preemptions > 0
    assert played["frames"][-1]["kv_blocks_used"] == 0
    assert played["frames"][-1]["computed_tokens"] == run.num_computed_tokens
    for frame in played["frames"]:
        owned = {block for _, _, _, blocks in frame["tables"] for block in blocks}
        assert len(owned) == frame["kv_blocks_used"] and frame["is_whole"]


def test_a_free_sheet(ask):
    source = (ROOT / "tutorials" / "lab" / "free.py").read_text(encoding="utf-8")
    (answer,) = ask(do="run", task="free", part=0, seed=3, source=source)
    assert ["requests", "200", "200"] in answer["table"] and answer["goals"] == []
    (answer,) = ask(do="run", task="free", part=0, seed=3, source=SHORTEST_FIRST)
    assert answer["sentence"].startswith("ValueError: there is no function load(seed)")


# --- what is wrong with a file ---

METHOD = "from nanovllm.scheduler import Scheduler\nclass MyScheduler(Scheduler):\n    def {}\n"


@pytest.mark.parametrize(
    "source, line, said",
    [
        ("x = 1\ndef f(:\n    pass", 2, "SyntaxError: invalid syntax"),
        ("x = 1\n\ny = z\n", 3, "NameError: name 'z' is not defined"),
        ("import torch", 1, "ModuleNotFoundError: "),
        ("x = 1", None, "there is no class MyScheduler that is a subclass of Scheduler"),
        (METHOD.format("priority(self, r):\n        return r.foo"), 4, "has no attribute 'foo'"),
        (METHOD.format("next_waiting(self):\n        return 3"), None, "it returned 3, and not N"),
        (METHOD.format("priority(self, r): pass"), None, "priority(): it returned None, and not a"),
        (
            METHOD.format("prioritty(self, r): pass"),
            None,
            "MyScheduler.prioritty(): the engine does not call",
        ),
        ("import sys\nprint('hi', file=sys.stderr)\nraise KeyboardInterrupt", 3, "KeyboardInt"),
        (METHOD.format("priority(self, r):\n        return self.priority(r)"), 4, "RecursionError"),
        ("raise SystemExit('bye')", 1, "SystemExit: bye"),
        ("raise MemoryError", 1, "more memory than the lab gives"),
        ("raise ValueError('<img src=x onerror=alert(1)>\\n' + 'x' * 9999)", 1, "<img src=x"),
    ],
)
def test_a_problem_is_a_sentence_with_its_line(ask, monkeypatch, source, line, said):
    monkeypatch.setitem(sys.modules, "torch", None)  # as in the browser
    (answer,) = ask(do="run", task="a1", part=0, seed=1, source=source)
    assert answer["line"] == line and said in answer["sentence"]
    assert answer["sentence"].startswith(f"line {line}: ") or line is None
    assert len(answer["sentence"]) < 600 and "\n" not in answer["sentence"]
    assert "tutorials/lab" not in answer["trace"]  # what is not theirs
    assert ask.printed == "hi\n" * ("stderr" in source)


@pytest.mark.parametrize("name", build.ASSIGNMENTS)
def test_without_pytest_there_are_the_same_tests(monkeypatch, tmp_path, name):
    file = tmp_path / "mine.py"
    file.write_text(starter(name), encoding="utf-8")
    monkeypatch.setenv("SOLUTION", "")
    with_pytest = [test.sentence for test in public_tests(name, file)]
    monkeypatch.setitem(sys.modules, "pytest", stand_in())
    without = [test.sentence for test in public_tests(name, file)]
    assert with_pytest == without and len(without) >= 4
    assert "every request is answered and every step keeps the rules (seed 3)" in without


def test_a_test_that_fails_says_its_sentence(ask, monkeypatch):
    def without_torch(*_, **__):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setenv("SOLUTION", "")
    monkeypatch.setattr("tutorials.assignments.public.answers_of", without_torch)
    answers = ask(do="tests", task="a1", source=SHORTEST_FIRST)
    found = {answer["test"]: answer for answer in answers if "test" in answer}
    starved = found["a long request starts while short ones keep coming"]
    assert starved["state"] == "failed" and starved["why"].endswith(" s: it starves")
    assert found.popitem()[1] == {
        "test": "the real engine gives the same answers",
        "state": "left out",
        "why": "is left to your machine, or to the grader: it needs PyTorch",
    }
    assert [one["state"] for one in found.values()] == ["passed"] * 3 + ["failed"]


def test_points_are_those_of_the_grader(ask):
    """The numbers stand in the handbook for instructors, which compares them with the grader's."""
    source = (SOLUTIONS / "a1_solution.py").read_text(encoding="utf-8")
    answers = ask(do="points", task="a1", source=source)
    lines = [
        f"{one['score']:6.1f} of {one['most']:4.0f}  {one['check']}: {one['says']}"
        for one in answers
        if "score" in one
    ]
    guide = (ROOT / "tutorials" / "assignments" / "README.md").read_text(encoding="utf-8")
    assert len(lines) == 4 and all(line in guide for line in lines)
    assert answers[-1] == {"total": 90.0, "most": 90}


def row(answer: dict, name: str) -> list[float]:
    (found,) = [texts for label, *texts in answer["table"] if label == name]
    return [float(text.rstrip("%").replace(",", "")) for text in found]


def test_the_sheets_answer_their_questions(ask):
    (answer,) = ask(do="sheet", name="budget", values={"tokens": 2048})
    before, now = row(answer, "longest step (s)")
    assert now > 1.5 * before
    (answer,) = ask(do="sheet", name="budget", values={"rate": 150})
    before, now = row(answer, "TTFT, p99 (s)")
    assert now > 5 * before
    (answer,) = ask(do="sheet", name="budget", values={"blocks": 160})
    assert row(answer, "preemptions")[1] > 0 == row(answer, "preemptions")[0]
    (answer,) = ask(do="sheet", name="order", values={"first": "shortest guess"})
    before, now = row(answer, "mean latency (s)")
    assert now < 0.7 * before
    before, longest = row(answer, "longest TTFT (s)")
    assert longest > 1.5 * before
    (answer,) = ask(do="sheet", name="order", values={"first": "shortest guess", "ageing": 100})
    assert row(answer, "longest TTFT (s)")[1] < longest
    (answer,) = ask(do="sheet", name="blocks", values={"size": 2048})
    before, now = row(answer, "of the blocks in use, empty")
    assert before < 10 and now > 80
    before, now = row(answer, "all answered after (s)")
    assert now > 1.3 * before


# --- what is built without npm ---


def test_the_zip_has_all_that_the_worker_needs(tmp_path):
    """With nothing of the repository, and without what the browser does not have."""
    build.zip_python(tmp_path / "python.zip")
    build.zip_python(tmp_path / "again.zip")
    assert (tmp_path / "python.zip").read_bytes() == (tmp_path / "again.zip").read_bytes()
    folder = tmp_path / "lab"
    with zipfile.ZipFile(tmp_path / "python.zip") as archive:
        archive.extractall(folder)
    asked = [{"do": "sheet", "name": "order", "values": {}}]
    asked += [{"do": "tests", "task": "a5", "source": starter("a5")}]
    code = f"""
import sys
for name in ("torch", "pytest", "numpy", "tqdm", "ctypes", "resource"):
    sys.modules[name] = None
sys.path.insert(0, {str(folder)!r})
from pathlib import Path
from tutorials.lab.session import Session
for question in {asked!r}:
    for answer in Session(Path({str(tmp_path)!r})).answers(question):
        assert "sentence" not in answer, answer
        print(answer.get("state"))
"""
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("passed") == 4 and "left" in done.stdout


def test_the_page_has_every_sheet():
    page = build.html()
    begin = page.index('id="data">') + len('id="data">')
    data = json.loads(page[begin : page.index("</script>", begin)])
    names = [sheet["name"] for sheet in data["sheets"]]
    assert names == [*SHEETS, "a1", "a2", "a3", "a4", "a5", "a6", "a8", "free"]
    for sheet in data["sheets"]:
        if sheet["group"] == "assignments":
            assert sheet["starter"] == starter(sheet["name"]) and sheet["goals"]


def test_no_text_becomes_markup():
    for file in (ROOT / "tutorials" / "lab").glob("*.js"):
        text = file.read_text(encoding="utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, (file.name, word)
