"""The house is in order: imports in one direction, no torch where none belongs, a short way for a
greedy prompt, and in the root only what belongs there.

Run: pytest tests/test_house.py [-k circle]
"""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanovllm"
NO_TORCH = (
    *(
        "options",
        "config",
        "sampling_params",
        "sequence",
        "block_manager",
        "beam_search",
        "scheduler",
    ),
    *("roofline", "stats", "simulator"),
)


IN_THE_ROOT = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "bench.py",
    "conftest.py",
    "example.py",
    "nanovllm",
    "pyproject.toml",
    "scripts",
    "tests",
    "tutorials",
}


def name_of(path: Path) -> str:
    return ".".join(("nanovllm", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


MODULES = {name_of(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def imported(node: ast.AST, everywhere: bool) -> set[str]:
    """Our modules that a module imports when it is loaded; with `everywhere` also those that its functions import.

    What stands under `if TYPE_CHECKING:` is never imported.
    """
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if (
            isinstance(child, ast.If)
            and isinstance(child.test, ast.Name)
            and child.test.id == "TYPE_CHECKING"
        ):
            continue
        if isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom) and child.module:
            names = {f"{child.module}.{alias.name}" for alias in child.names}
            found |= names & MODULES.keys() or {child.module}
        elif everywhere or not isinstance(child, ast.FunctionDef):
            found |= imported(child, everywhere)
    return {name for name in found if name in MODULES}


def test_imports_make_no_circle():
    """Also counting what is imported late, within functions; the package itself hands out LLM when it is asked for."""
    waiting = {
        name: imported(tree, everywhere=True)
        for name, tree in MODULES.items()
        if name != "nanovllm"
    }
    while waiting:
        ready = [name for name, needs in waiting.items() if not needs & waiting.keys()]
        assert ready, f"these import each other: {waiting}"
        for name in ready:
            del waiting[name]


def test_layers_and_models_know_nothing_of_requests():
    for name, tree in MODULES.items():
        if name.startswith(("nanovllm.layers", "nanovllm.models")):
            others = {
                other
                for other in imported(tree, everywhere=True)
                if not other.startswith("nanovllm.layers")
            }
            assert not others, f"{name} imports {others}"


def test_layers_import_nothing_late():
    for name, tree in MODULES.items():
        if name.startswith("nanovllm.layers"):
            assert imported(tree, everywhere=True) == imported(tree, everywhere=False), name


@pytest.mark.parametrize("module", NO_TORCH)
def test_the_scheduling_half_does_not_import_torch(module):
    code = f"import nanovllm.{module}, sys; assert not {{'torch', 'transformers', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_greedy_prompt_passes_few_files_and_functions(monkeypatch):
    """Properties are functions; comprehensions are not. The thread count may change, which takes two functions more."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    llm, passed = LLM(num_blocks=100), set()

    def profile(frame, event, arg):
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(str(PACKAGE))
            and not code.co_name.startswith("<")
        ):
            passed.add((code.co_filename, code.co_name, code.co_firstlineno))

    sys.setprofile(profile)
    try:
        llm.generate(
            "Once upon a time", SamplingParams(temperature=0, max_tokens=20), use_tqdm=False
        )
    finally:
        sys.setprofile(None)
    assert len({file for file, _, _ in passed}) <= 14 and 50 < len(passed) <= 70, sorted(passed)


def test_the_root_holds_what_belongs_there():
    """Of what git knows; a reader's own files may lie beside it."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no clone, or there is no git")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip(f"git says: {listing.stderr}")
    paths = listing.stdout.split("\0")
    assert {path.partition("/")[0] for path in paths if path} == IN_THE_ROOT
