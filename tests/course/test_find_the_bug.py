"""Assignment 0 cannot be gamed: empty classes, wrong repairs and hostile answers.

Run: pytest tests/course/test_find_the_bug.py [-k answer] [--slow]
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from nanovllm import Run
from nanovllm.schedule import ScheduleError
from tutorials.assignments.a0.questions import INVARIANTS, QUESTIONS
from tutorials.assignments.a0.task import check_counts
from tutorials.assignments.public import check_rules, load
from tutorials.assignments.task import Part, load_task, serve_baseline

FILES = Path(__file__).parent / "solutions"
STARTER = Path(__file__).parents[2] / "tutorials" / "assignments" / "a0" / "starter.py"
TASK = load_task("a0")
PARTS = {part.name: part for part in TASK.parts}
SEED = 101
NO_ANSWERS = ["?", *INVARIANTS]


def solution() -> ModuleType:
    return load(FILES / "a0_solution.py")


def short(part: Part, num_jobs: int = 60) -> Part:
    return replace(part, workload=lambda seed: part.workload(seed)[:num_jobs])


def part_points(part: Part, module) -> float:
    try:
        run = check_rules(part, module, SEED)
    except Exception:  # a bug may end in any of them
        return 0
    is_whole = part is PARTS[part.name]
    baseline = baseline_of(part.name) if is_whole else serve_baseline(part, SEED)
    return part.points + sum(goal.score(goal.measure(run, baseline)) for goal in part.goals)


@cache
def baseline_of(name: str) -> Run:
    """The same for all repairs."""
    return serve_baseline(PARTS[name], SEED)


def full_points(part: Part) -> float:
    return part.points + sum(goal.points for goal in part.goals)


def question_points(answers: dict) -> float:
    right = [name for name, problem in TASK.questions.items() if problem(answers[name]) is None]
    return TASK.question_points * len(right)


@pytest.mark.parametrize("part", TASK.parts, ids=lambda part: part.name)
def test_the_handout_has_what_the_public_tests_say_of_the_starter(part):
    handout = STARTER.with_name("README.md").read_text(encoding="utf-8")
    with pytest.raises(ScheduleError) as problem:
        check_rules(part, load(STARTER), 1)
    assert f"{part.name} is broken, seed 1: ScheduleError: {problem.value}\n" in handout


# --- classes ---


def test_empty_classes_get_less_than_10_points_with_any_names():
    empty = load(FILES / "a0_empty.py")
    assert 0 < sum(part_points(short(part), empty) for part in TASK.parts) < 10
    for name in NO_ANSWERS:
        answers = {key: {**answer, "breaks": name} for key, answer in empty.ANSWERS.items()}
        assert question_points(answers) == 0


RIGHT = (FILES / "a0_solution.py").read_text(encoding="utf-8")
BUDGET = "return min(len(self.running) + 256, self.max_num_batched_tokens), 256"
COUNT = "sum(self.blocks[block_id].ref_count == 1 for block_id in seq.block_table)"
NUM_FREED = "num_freed = 0\n\n    def free"
NEXT = "return self.preempted[0] if self.preempted else super().next_waiting()"
KEEPS = """if any(self.blocks[block_id].ref_count > 1 for block_id in seq.block_table):
            seq.block_table = []
        super().free(seq)"""
# part, name -> what is replaced in the solution
REPLACED = {
    ("A", "forgets the preempted"): [(NEXT, "return super().next_waiting()")],
    ("A", "last preempted first"): [(NEXT, NEXT.replace("[0]", "[-1]"))],
    ("A", "first come, first served"): [("return len(request.prompt_token_ids), ", "return ")],
    ("B", "counts nothing"): [(NUM_FREED, "def unused")],
    ("B", "counts zero"): [(COUNT, "0")],
    ("B", "counts what is free"): [
        (NUM_FREED, "num_freed = property(lambda self: self.num_free_blocks)\n    def unused")
    ],
    ("B", "never frees"): [("super().free(seq)", KEEPS)],
    ("B", "never shares"): [
        ("    def free", "    def find_prefix(self, seq):\n        return []\n    def free")
    ],
    ("C", "no limit"): [(BUDGET, "return super().step_budget()")],
    ("C", "tiny budget"): [(BUDGET, "return 64, 64")],
    ("C", "one budget"): [(BUDGET, f"return {BUDGET[7:-5]}, {BUDGET[7:-5]}")],
    ("C", "only prompts"): [(BUDGET, "return 256, 256 - len(self.running)")],
}
# more than the rules, less than all
# others earn nothing: what they have is there from the start, or is paid for by what they forget
PARTLY_RIGHT = {"last preempted first", "one budget", "only prompts"}


def wrong(part: str, name: str) -> SimpleNamespace:
    """The solution's module with the replacements."""
    source = RIGHT
    for old, new in REPLACED[part, name]:
        assert old in source
        source = source.replace(old, new)
    namespace: dict = {}
    exec(source, namespace)
    return SimpleNamespace(**namespace)


@pytest.mark.slow
@pytest.mark.parametrize("part_name, name", REPLACED)
def test_a_wrong_repair_gets_less_than_all(part_name, name):
    part = PARTS[part_name]
    points = part_points(part, wrong(part_name, name))
    assert points < full_points(part)
    if name in PARTLY_RIGHT:
        assert points > part.points + 5
    if part_name == "B":
        assert points == 0


def test_what_is_counted_is_checked():
    part = short(PARTS["B"], num_jobs=30)
    check_counts(part, solution().BlockManagerB, SEED)
    for name, counted in (
        ("counts zero", r"\d+: .* is 0, not \d+"),
        ("counts nothing", "1: .* is None, not 0"),
        ("counts what is free", r"\d+: .* is .+, not \d+"),
        ("never shares", r"\d+: .* is .+, not \d+"),
    ):
        with pytest.raises(AssertionError, match=f"^step {counted}$"):
            check_counts(part, wrong("B", name).BlockManagerB, SEED)


def test_the_solution_counts_what_is_counted_when_memory_runs_out():
    """And in the end each block that was taken is free."""
    part = short(PARTS["A"], num_jobs=60)
    check_counts(part, solution().BlockManagerB, SEED)
    assert check_rules(replace(part, scheduler="Scheduler"), solution(), SEED).num_preemptions > 0


# --- answers ---


def test_the_answers_of_the_solution_are_right():
    answers = json.loads(json.dumps(solution().ANSWERS))
    assert [TASK.questions[name](answers[name]) for name in TASK.questions] == [None] * 3


@pytest.mark.parametrize(
    "name, load, sentence",
    [
        (
            "A",
            [[0, 60, 20], [5, 20, 20]],
            "no rule is broken by the load: no request was preempted",
        ),
        ("A", [[0, 60, 60], [0, 60, 60]], "the load has 240 tokens, but at most 120 are allowed"),
        ("A", [[0, 5, 5]] * 4, "the load must be a list of 1 to 3 requests, and not [[0, 5, 5], "),
        ("A", [[0, 5]], "request 0 must be a list [seconds, prompt tokens, output tokens], and"),
        ("A", [[0, 5, 0]], "request 0: output tokens must be an integer from 1 to 120, and not 0"),
        ("A", [[11, 5, 5]], "request 0: seconds must be a number from 0 to 10, and not 11"),
        ("B", [[0, 17, 1, 0], [0, 17, 2, 16]], "no rule is broken by the load: no block was share"),
        ("B", [[0, 17, 2, 16], [0, 17, 2, 16]], "no rule is broken by the load: blocks were share"),
        ("B", [[0, 5, 1, 6]], "request 0: shared tokens must be an integer from 0 to 5, and not 6"),
        ("C", [[0, 1, 2]] * 5, "no rule is broken by the load: the fullest step had 5 tokens"),
        ("C", [[0, 1, 2]] * 5 + [[0, 260, 1]], "no rule is broken by the load: the fullest step"),
    ],
)
def test_the_sentence_says_what_happened_instead(name, load, sentence):
    question = QUESTIONS[name]
    assert question({"breaks": question.invariant, "load": load}).startswith(sentence)
