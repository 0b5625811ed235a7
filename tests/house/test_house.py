"""The house is in order: imports in one direction, no torch where none belongs, a short way for a
greedy prompt, and in the root only what belongs there.

Run: pytest tests/house/test_house.py [-k circle]
"""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from imports import MODULES, imported, name_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nanovllm"
NO_TORCH = (
    *("options", "config", "sampling_params", "sequence", "block_manager"),
    *("schedule", "scheduler", "processing.messages", "processing.stats"),
    *("topics.swapping.blocks", "topics.decoding.groups", "topics.decoding.beam_search"),
    *("topics.checks.schedules", "topics.checks.blocks", "topics.simulator", "topics.routing"),
    "topics.fairness.shares",
)

IN_THE_ROOT = {
    *".ci .github .gitignore AGENTS.md CHANGELOG.md CITATION.cff CONTRIBUTING.md LICENSE".split(),
    *"README.md bench.py conftest.py example.py nanovllm pyproject.toml scripts tests tutorials".split(),
}


def test_imports_make_no_circle():
    """Also counting what is imported late, within functions; the package itself hands out LLM when it is asked for."""
    check_no_circle(
        {
            name: imported(tree, everywhere=True)
            for name, tree in MODULES.items()
            if name != "nanovllm"
        }
    )


def check_no_circle(waiting: dict[str, set[str]]) -> None:
    while waiting:
        ready = [name for name, needs in waiting.items() if not needs & waiting.keys()]
        assert ready, f"these import each other: {waiting}"
        for name in ready:
            del waiting[name]


def room_of(name: str) -> str:
    """A module of the root is a room, and so are each folder and each topic."""
    parts = name.split(".")
    return ".".join(parts[1:3]) if parts[1] == "topics" else parts[1]


def test_imports_between_rooms_make_no_circle():
    """The core, and each topic as a whole: one can be read after the other."""
    waiting: dict[str, set[str]] = {}
    for name, tree in MODULES.items():
        if name != "nanovllm":
            rooms = {room_of(other) for other in imported(tree, everywhere=True) - {"nanovllm"}}
            waiting.setdefault(room_of(name), set()).update(rooms - {room_of(name)})
    check_no_circle(waiting)


def test_each_topic_has_a_folder_with_a_sentence():
    folders = {path.parent for path in (PACKAGE / "topics").glob("*/__init__.py")}
    assert {"decoding", "checks", "parallel"} <= {folder.name for folder in folders}
    for folder in folders | {PACKAGE / "processing", PACKAGE / "device", PACKAGE / "topics"}:
        sentence = ast.get_docstring(MODULES[name_of(folder)])
        assert sentence and sentence.endswith("."), folder


def test_in_the_root_lies_the_core():
    assert len([*PACKAGE.glob("*.py")]) <= 17  # 15 modules, __init__ and __main__


HALF_SENTENCES = (
    "Of As Who Whoever With For From To Those Nobody Somebody In At By Not Until They Also Like"
)


@pytest.mark.parametrize("name", MODULES)
def test_a_docstring_begins_with_a_verb_or_the_noun(name):
    """And does not call a request or a token somebody."""
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or "Nothing is said."
            assert text.split()[0].strip(",.:;") not in HALF_SENTENCES.split(), text
            is_vague = re.search(r"\b(nobody|somebody|anybody|whoever)\b", text, re.IGNORECASE)
            assert not is_vague, text


def test_layers_and_models_know_nothing_of_requests():
    for name, tree in MODULES.items():
        if name.startswith(("nanovllm.layers", "nanovllm.models")):
            others = {
                other
                for other in imported(tree, everywhere=True)
                if not other.startswith(("nanovllm.layers", "nanovllm.models"))
            }
            assert not others, f"{name} imports {others}"


def test_layers_import_nothing_late():
    for name, tree in MODULES.items():
        if name.startswith("nanovllm.layers"):
            assert imported(tree, everywhere=True) == imported(tree, everywhere=False), name


def test_the_scheduling_half_does_not_import_torch():
    """One module after the other, in one process."""
    heavy = "assert not {'torch', 'transformers', 'tokenizers', 'numpy'} & {*sys.modules}"
    lines = [f"import nanovllm.{module}; {heavy}, {module!r}" for module in NO_TORCH]
    subprocess.run([sys.executable, "-c", "\n".join(["import sys", *lines])], check=True)


def test_the_root_holds_what_belongs_there():
    """Of what git knows; a reader's own files may lie beside it."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no clone, or there is no git")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip(f"git says: {listing.stderr}")
    paths = listing.stdout.split("\0")
    assert {path.partition("/")[0] for path in paths if path} == IN_THE_ROOT


def test_a_file_of_tests_is_no_library():
    """What several files of tests share is in tests/tools."""
    importing = re.compile(r"^ *(from|import) ([\w.]+\.)?test_", re.MULTILINE)
    for path in (ROOT / "tests").rglob("*.py"):
        assert not importing.search(path.read_text(encoding="utf-8")), path
