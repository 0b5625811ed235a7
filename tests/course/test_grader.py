"""The grader: what breaks costs its points and is said in a sentence with the step; cheating wins nothing.

Run: pytest tests/course/test_grader.py [-k cheat]
"""

import json
import os
import re
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from submissions import FCFS, HEAD, SHORTEST_FIRST, choose, method, priority

from nanovllm import Run
from nanovllm.config import Config
from tutorials.assignments import process
from tutorials.assignments.grade import new_grader, secret_seeds
from tutorials.assignments.grader import Grader
from tutorials.assignments.task import Goal, Part, Task, mean_latency, measure
from tutorials.simulation.workloads import all_at_once, predicted, sharegpt, workload

ROOT = Path(__file__).parents[2]


def latency_ratio(run: Run, baseline: Run) -> float:
    return mean_latency(run) / mean_latency(baseline)


def jobs(seed: int):
    return predicted(workload(all_at_once(), sharegpt(max_model_len=512, seed=seed), 40), sigma=0.0)


PART = Part(
    "load",
    jobs,
    Config(
        model="qwen3-0.6b",
        num_blocks=200,
        max_model_len=4096,
        max_num_batched_tokens=512,
        max_num_seqs=32,
    ),
    [Goal("mean latency / FCFS", latency_ratio, none=1.0, full=0.9, points=60)],
    points=30,
)
TASK = Task("shortest first", [PART], engine_points=0)


pytestmark = pytest.mark.usefixtures("impatient")


def graded(tmp_path, code: str, task: Task = TASK, seeds=(1,), **options):
    path = tmp_path / "solution.py"
    path.write_text(code)
    return Grader(task, list(seeds), **options).grade(path)


def rules(report) -> tuple[float, str]:
    return report.checks[0].score, report.checks[0].output


def test_fcfs_keeps_the_rules_and_reaches_no_goal(tmp_path):
    report = graded(tmp_path, FCFS, seeds=(1, 2))
    assert [check.score for check in report.checks] == [30, 0]
    # the same run as in this process, to the last digit
    assert report.values == {"load, mean latency / FCFS": 1.0}


def test_shortest_first_gets_all(tmp_path):
    report = graded(tmp_path, SHORTEST_FIRST)
    assert report.score == report.max_score == 90, report.table()


STEALS = method(
    """
super().admit(request)
if len(self.running) > 1:
    request.sequences[0].block_table[-1] = self.running[0].sequences[0].block_table[-1]
""",
    "admit",
    ", request",
)
IN_QUEUES = r"step \d+: .*Request\(\d+\) has not ended, but is %d times in waiting and running"
BROKEN = {
    "over the budget": (
        method("return 10**6, 10**6", "step_budget"),
        r"step 1: MyScheduler.schedule\(\): the schedule has \d+ tokens, but max_num_batched_tokens=",
    ),
    "doubles": (
        method("super().preempt(request)\nself.waiting.append(request)", "preempt", ", request"),
        IN_QUEUES % 2,
    ),
    "starves": (
        method("return request.request_id != '7'", "may_admit", ", request, schedule"),
        r"step \d+: .* planned nothing, but there are unfinished requests: \['7', ",
    ),
    "serves none": (method("pass", "next_waiting"), r"next_waiting\(\) returned None, and no req"),
    "ends early": (
        method("return 'length'", "reason_to_end", ", seq"),
        r"step 2: MyScheduler.update\(\): it has ended Request\(0\) at output token 1, but the answer",
    ),
    "livelock": (
        method(
            "for request in [*self.running]:\n    self.preempt(request)", "make_room", ", schedule"
        )
        + "    def step_budget(self):\n        return 8, 8\n",
        r"step \d+.* \d+ steps without a new token",
    ),
    "crashes": (
        priority("request.arrival / (request.num_output_tokens - 5)"),
        r"step \d+: ZeroDivisionError: .* \(line \d+ of your file, in priority\)",
    ),
    "hangs": (
        method(
            "while len(self.running) > 5:\n    pass\nreturn super().next_waiting()", "next_waiting"
        ),
        r"step \d+: your file has not answered for 2 s: it was in .*solution.py.*next_waiting",
    ),
    "wrong victim": (
        method("return None", "victim", ", candidates"),
        r"step \d+: MyScheduler.victim\(\): it returned None, and not one of the candidates",
    ),
    "never ends": (
        method(
            "if seq.request.request_id != '3':\n    super().finish(seq, reason)",
            "finish",
            ", seq, reason",
        ),
        r"step \d+: .*Request\(3\) has drawn its last token, but has not ended",
    ),
    "steals": (STEALS, r"step \d+: .*block"),
    "does not load": (
        "\nimport no_such_module\n",
        r"^ModuleNotFoundError: No module named 'no_such_module' \(line 2 of your file",
    ),
    "no class": ("class Other:\n    pass\n", "^your file has no class MyScheduler$"),
    "exits at once": ("raise SystemExit(0)\n", "^SystemExit: 0"),
}
# --- cheating ---

PATCHED_COST = """
import time
import nanovllm.topics.simulator.simulation
nanovllm.topics.simulator.simulation.Machine.seconds = lambda *args: 1e-9
time.monotonic = time.perf_counter = lambda: 0.0
class MyScheduler(Scheduler):
    def __init__(self, *args):
        super().__init__(*args)
        self.clock = lambda: 0.0
"""
PATCHED_CHECKS = """
import sys
import nanovllm.topics.checks.schedules
nanovllm.topics.checks.schedules.check_schedule = lambda *args, **kwargs: None
sys.modules["tutorials.assignments.player"].check_queues = lambda *args, **kwargs: None
"""
MORE_BLOCKS = (
    PATCHED_CHECKS
    + """
class MyScheduler(Scheduler):
    def __init__(self, limits, manager):
        manager.__init__(10 * len(manager.blocks), manager.block_size)
        super().__init__(limits, manager)
"""
)
LARGER_LIMITS = (
    PATCHED_CHECKS
    + """
class MyScheduler(Scheduler):
    def __init__(self, limits, manager):
        super().__init__(limits, manager)
        self.max_num_batched_tokens = self.max_num_seqs = 10**6
"""
)
SKIPS_WORK = (
    PATCHED_CHECKS
    + """
class MyScheduler(Scheduler):
    def schedule(self):
        schedule = super().schedule()
        self.events = [[kind, i, *(10**6 for _ in n[:1])] for kind, i, *n in self.events]
        return schedule
"""
)
PEEKS = """
import gc, sys
class MyScheduler(Scheduler):
    def priority(self, request):
        frame, found = sys._getframe(), []
        while frame is not None:
            found += [value for value in frame.f_locals.values() if type(value).__name__ in ("Job", "Run", "Simulation")]
            frame = frame.f_back
        if not hasattr(self, "jobs"):
            self.jobs = [thing for thing in gc.get_objects() if type(thing).__name__ == "Job"]
        return found[0].num_outputs if found else self.jobs[request.arrival].num_outputs if self.jobs else request.arrival
"""
FORGES = (
    """
import json, os
for fd in range(3, 20):
    try:
        os.write(fd, b'{"constants": {"ANSWERS": null}, "score": 100, "events": [], "counts": []}\\n' * 3)
    except OSError:
        continue
"""
    + FCFS
)
NONSENSE = """
class MyScheduler(Scheduler):
    def schedule(self):
        schedule = super().schedule()
        self.events += [["steal", "0", None], 7]
        return schedule
"""
CHEATS = {
    "patches the cost and the clock": (PATCHED_COST, None),
    "has ten times the blocks": (MORE_BLOCKS, r"step \d+.*needs more than the \d+ free blocks"),
    "sets its own limits": (
        LARGER_LIMITS,
        r"step 1.* the schedule has \d+ tokens, but max_num_batched_tokens=512",
    ),
    "claims work that it has not done": (
        SKIPS_WORK,
        r"step 1.*is to compute 1000000 tokens, but \d+ are missing",
    ),
    "looks for the true lengths": (PEEKS, None),
    "forges answers": (FORGES, r"your file has no class MyScheduler"),
    "sends nonsense": (NONSENSE, r"step 1.*no decision"),
}


def test_a_fault_is_said_once(tmp_path):
    """Each part has it, at steps of its own."""
    task = replace(TASK, parts=[PART, replace(PART, name="again"), replace(PART, name="third")])
    checks = graded(tmp_path, priority("1 / 0"), task).checks
    said = [check.output for check in checks if check.name.endswith("rules")]
    assert "ZeroDivisionError" in said[0] and "step 1" in said[0]
    assert said[1:] == ["the same fault as in load, rules"] * 2


@pytest.mark.parametrize("is_starved", [True, False])
def test_a_busy_machine_takes_no_time_from_a_file(tmp_path, monkeypatch, is_starved):
    """A process that only waits for a processor has all its time."""
    clock = time.monotonic if is_starved else lambda: 0.0
    start = clock()
    monkeypatch.setattr(process, "seconds_of", lambda pid: (0.0, clock() - start))
    monkeypatch.setattr(process, "SECONDS_PER_CALL", 0.2)
    code = method(
        "import time\ntime.sleep(0.3 if self.clock() == 0 else 0)\nreturn super().schedule()"
    )
    (check, _) = graded(tmp_path, code).checks
    assert check.output.startswith(
        "all kept" if is_starved else "step 1: your file has not answered"
    )


# --- guesses ---


def guessed(seed: int):
    """Of every second answer all is guessed rightly, of the others nothing."""
    return [
        job._replace(right_draft_tokens=[16 * (i % 2)] * (job.num_outputs - 16))
        for i, job in enumerate(jobs(seed))
    ]


GUESSING = Task(
    "guesses",
    [
        replace(
            PART,
            workload=guessed,
            config=replace(PART.config, speculative_config={"method": "ngram"}),
        )
    ],
    engine_points=0,
)
SOMETIMES = method(
    "return 9 * (request.num_output_tokens % 3 > 0)", "num_draft_tokens", ", request"
)


def test_guesses_are_graded(tmp_path):
    """The same runs as in this process, to the last digit: also the policy that is graded sees of
    each answer as many tokens as were right."""
    values = []
    for code in (FCFS, SOMETIMES):
        report = graded(tmp_path, code, GUESSING)
        assert report.checks[0].score == 30, report.table()
        namespace: dict = {}
        exec(code, namespace)
        expected = measure(GUESSING.parts[0], namespace["MyScheduler"], seed=1)
        assert [*report.values.values()] == [*expected.values()]
        values += expected.values()
    assert values[0] != values[1] and max(values) < 0.9, "guesses change nothing"


# --- routers ---

ROUTERS = Task("least loaded", [replace(PART, router="MyRouter", replicas=3)], engine_points=0)
IN_TURN = choose("return in_turn(request, loads)")


def test_a_router_is_graded(tmp_path):
    """The same runs as in this process, to the last digit."""
    report = graded(tmp_path, IN_TURN, ROUTERS, seeds=(1, 2))
    assert [check.score for check in report.checks] == [30, 0]
    assert report.values == {"load, mean latency / FCFS": 1.0}
    code = choose("return [*loads][len(request.prompt_token_ids) % len(loads)]")
    report = graded(tmp_path, code, ROUTERS)
    namespace: dict = {}
    exec(code, namespace)
    expected = measure(ROUTERS.parts[0], namespace["MyRouter"], seed=1)
    assert [*report.values.values()] == [*expected.values()] != [1.0]
    assert report.checks[0].score == 30, report.table()


BROKEN_ROUTERS = {
    "no such replica": (
        choose("return 7"),
        r"request 0: MyRouter.choose\(\): 7 is not one of \[0, 1, 2\]",
    ),
    "all replicas": (
        choose("return [*loads]"),
        r"request 0: .*\[0, 1, 2\] is not one of \[0, 1, 2\]",
    ),
    "crashes": (
        choose("return in_turn(request, loads) // (loads[0] < 3)"),
        r"request \d+: ZeroDivisionError: .* \(line \d+ of your file, in choose\)",
    ),
    "no class": (FCFS, "your file has no class MyRouter"),
    "no choose": (
        "from nanovllm import Router\nclass MyRouter(Router):\n    pass\n",
        "request 0: NotImplementedError",
    ),
}


def unchecked(choice: str) -> str:
    """A router that returns this, and patches what would look at it in its own process."""
    return f"import sys\nsys.modules['tutorials.assignments.player'].check_choice = lambda *args: None\n{choose(f'return {choice}')}"


SENDS = """
import sys
frame = sys._getframe()
while "answers" not in frame.f_locals:
    frame = frame.f_back
frame.f_locals["answers"].write('{"events": []}\\n')
frame.f_locals["answers"].flush()
"""
SPOILS = """
name = in_turn(request, loads)
loads.clear()
request.prompt_token_ids.clear()
object.__setattr__(request.params, "max_tokens", 1)
return name
""".strip()
LOOKS = """
import gc, sys
frame = sys._getframe()
kinds = ("Job", "Run", "Simulation", "Replica", "Served")
while frame is not None:
    assert not any(type(value).__name__ in kinds for value in frame.f_locals.values())
    frame = frame.f_back
assert not any(type(thing).__name__ in kinds for thing in gc.get_objects())
return in_turn(request, loads)
""".strip()
NO_REPLICA = "request 0: .* what is no replica: "
ROUTER_CHEATS = {
    "patches the cost and the clock": (PATCHED_COST.partition("class")[0] + IN_TURN, None),
    "spoils what it gets": (choose(SPOILS), None),
    "looks for the true lengths": (choose(LOOKS), None),
    "a replica of its own": (unchecked("99"), f"{NO_REPLICA}99"),
    "true": (unchecked("True"), f"{NO_REPLICA}True"),
    "a text": (unchecked("'0'"), f"{NO_REPLICA}'0'"),
    "a fraction": (unchecked("1e400"), f"{NO_REPLICA}inf"),
    "a list": (unchecked("[0]"), rf"{NO_REPLICA}\[0\]"),
    "another answer": (choose(SENDS), f"{NO_REPLICA}None"),
}


# --- files that break, and files that cheat ---


def cases(task: Task, codes: dict) -> list:
    return [pytest.param(task, *case, id=name) for name, case in codes.items()]


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize(
    "task, code, message", cases(TASK, BROKEN) + cases(ROUTERS, BROKEN_ROUTERS)
)
def test_what_is_broken_is_one_sentence_with_the_step_or_the_request(tmp_path, task, code, message):
    report = graded(tmp_path, code, task)
    assert report.score == 0
    assert re.search(message, rules(report)[1]) and "\n" not in rules(report)[1], rules(report)[1]


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("task, code, message", cases(TASK, CHEATS) + cases(ROUTERS, ROUTER_CHEATS))
def test_cheating_wins_nothing(tmp_path, task, code, message):
    """It is refused with a sentence, or is as good as the baseline."""
    report = graded(tmp_path, HEAD + code, task)
    if message is None:
        assert [check.score for check in report.checks] == [30, 0], report.table()
        assert [*report.values.values()] == [1.0]
    else:
        assert report.score == 0 and re.search(message, rules(report)[1]), rules(report)[1]


# --- what else the report says ---


def test_questions(tmp_path):
    def is_even(answer) -> str | None:
        return None if answer in (2, 4) else f"{answer!r} is not 2 or 4"

    task = Task(
        "quiz", [], engine_points=0, questions={"A": is_even, "B": is_even}, question_points=5
    )
    report = graded(tmp_path, "ANSWERS = {'A': 4}\n", task)
    assert [check.score for check in report.checks] == [5, 0]
    assert report.checks[1].output == "None is not 2 or 4"


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, score, part",
    [(SHORTEST_FIRST, 10, PART), (STEALS, 0, PART), (SOMETIMES, 10, GUESSING.parts[0])],
    ids=["right", "wrong", "guesses"],
)
def test_the_engine_gives_the_same_answers(tmp_path, code, score, part):
    nothing = replace(part, workload=lambda seed: jobs(seed)[:1])
    report = graded(tmp_path, code, Task("answers", [nothing], engine_points=10))
    assert report.checks[-1].name == "the real engine"
    assert report.checks[-1].score == score, report.table()


# refuses the real engine, which would load PyTorch, and puts another one in its place
NOT_IN_AN_ENGINE = """
import sys
class MyScheduler(Scheduler):
    def commit(self, items, schedule):
        if any(item.seq.index for item in items):
            raise RuntimeError("no samples")
        super().commit(items, schedule)
"""
PATCHED_ENGINE = (
    NOT_IN_AN_ENGINE
    + """
import nanovllm
player = sys.modules["tutorials.assignments.player"]
def run_engine(module, start):
    module.MyScheduler = Scheduler
    return real(module, start)
real = getattr(player, "run_engine", None)
player.run_engine = run_engine
nanovllm.LLM = type("LLM", (), {"generate": lambda self, *args: []})
"""
)
ANSWERS_ITSELF = """
import sys
player = sys.modules["tutorials.assignments.player"]
class MyScheduler(Scheduler):
    def schedule(self):
        frame = sys._getframe()
        while "answers" not in frame.f_locals:
            frame = frame.f_back
        frame.f_locals["answers"].write('{"tokens": [[[1]]] , "events": [], "counts": []}\\n')
        return super().schedule()
"""
ENDS_EARLY = """
class MyScheduler(Scheduler):
    def reason_to_end(self, seq):
        return "stop" if seq.num_output_tokens else None
"""
ENGINE_CHEATS = {
    "as it is": (NOT_IN_AN_ENGINE, r"step \d+: RuntimeError: no samples"),
    "patched": (PATCHED_ENGINE, r"step \d+: RuntimeError: no samples"),
    "answers of its own": (ANSWERS_ITSELF, r"planned nothing"),
    "one token for each prompt": (ENDS_EARLY, r"step \d+: "),
}


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("cheat", ENGINE_CHEATS)
def test_no_patch_wins_the_points_of_the_engine(tmp_path, cheat):
    """The model is not in the process of the file."""
    code, message = ENGINE_CHEATS[cheat]
    nothing = replace(PART, workload=lambda seed: jobs(seed)[:1])
    report = graded(tmp_path, HEAD + code, Task("answers", [nothing], engine_points=10))
    assert report.checks[-1].name == "the real engine"
    assert report.checks[-1].score == 0, report.table()
    found = report.checks[-1].output
    if found.startswith("the same fault as in"):  # then that check has said it
        found = report.checks[0].output
    assert re.search(message, found), report.table()


def test_results_for_gradescope(tmp_path):
    written = []
    graded(tmp_path, SHORTEST_FIRST, on_check=lambda report: written.append(report.results()))
    assert len(written) == 2  # after each check, and the last is whole
    results = json.loads(json.dumps(written[-1]))
    assert results["score"] == 90 and [test["max_score"] for test in results["tests"]] == [30, 60]
    assert {"name", "value"} == results["leaderboard"][0].keys()


def test_secret_seeds():
    seeds = secret_seeds("a", "a1")
    assert seeds == secret_seeds("a", "a1") != secret_seeds("b", "a1") != secret_seeds("b", "a2")
    assert all(2**100 < seed < 2**128 for seed in seeds)


def test_a_file_with_a_secret_gives_the_seeds(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("a long enough secret\n")
    secret.chmod(0o600)
    args = Namespace(task="a1", secret=secret, limit=300)
    grader = new_grader(ArgumentParser(), args)
    assert grader.is_secret and grader.seeds == secret_seeds("a long enough secret", "a1")


# --- the command line ---


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_script_of_gradescope(tmp_path, mode):
    """The folders are those of its container. A secret that others can read is refused."""
    for name in ("source", "submission", "results", "venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    source = tmp_path / "source"
    for name in ("nanovllm", "tutorials"):
        (source / name).symlink_to(ROOT / name)
    (source / "assignment.txt").write_text("a1\n")
    (source / "secret.txt").write_text("a long enough secret\n")
    (source / "secret.txt").chmod(mode)
    python = tmp_path / "venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "submission/my_scheduler.py").write_text("raise ValueError('this is it')\n")
    script = ROOT / "tutorials/assignments/gradescope/run_autograder"
    env = {**os.environ, "AUTOGRADER": str(tmp_path)}
    result = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=env)
    file = tmp_path / "results/results.json"
    if mode == 0o600:
        assert result.returncode == 0, result.stderr
        output = json.loads(file.read_bytes())["tests"][0]["output"]
        assert "what it says on secret seeds is not shown" in output
    else:
        assert "others can read it" in result.stderr and not file.exists()


def test_several_files(tmp_path):
    """Each has results of its own, also those that do not load. What cannot be written is a sentence."""
    files = []
    for name in ("blocked", "one", "two"):
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(f"raise ValueError('this is {name}')\n")
    folder = tmp_path / "results"
    (folder / "blocked.json").mkdir(parents=True)
    command = [sys.executable, "-m", "tutorials.assignments.grade", "a1", *map(str, files)]
    command += ["--json", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert f"{folder / 'blocked.json'} was not written: Is a directory" in result.stderr
    assert "this is blocked" in result.stdout and "Traceback" not in result.stderr
    for name in ("one", "two"):
        results = json.loads((folder / f"{name}.json").read_bytes())
        assert results["score"] == 0
        sentence = f"ValueError: this is {name} (line 1 of your file, in <module>)"
        assert results["tests"][0]["output"] == sentence
