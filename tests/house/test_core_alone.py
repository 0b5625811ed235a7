"""A plain prompt needs the core and no topic: what it loads, what it runs, and what the core imports.

Run: pytest tests/house/test_core_alone.py
"""

import json
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from imports import MODULES, imported
from sizes import size_of

ROOT = Path(__file__).parents[2]
CODE = """
import json
import os
import sys

import torch

from nanovllm import LLM, SamplingParams

torch.set_num_threads(1)  # with more, a step looks how many processors are free
lines = set()
loaded = []


def generate(llm):
    llm.generate("12 + 30 =", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    modules = [(name, module) for name, module in sys.modules.items() if name.split(".")[0] == "nanovllm"]
    loaded.append({name: module.__file__ for name, module in modules})


def trace(frame, event, arg):
    if not frame.f_code.co_filename.startswith(package):
        return None
    if event == "line":
        lines.add((os.path.relpath(frame.f_code.co_filename, package), frame.f_lineno))
    return trace


llm = LLM(attention_backend="torch", dtype="float32", num_blocks=50)
generate(llm)
package = os.path.dirname(loaded[0]["nanovllm"])
sys.settrace(trace)
generate(llm)
sys.settrace(None)
for dtype in sys.argv[1:]:
    generate(LLM(attention_backend="numba", dtype=dtype, num_blocks=50))
print(json.dumps({"loaded": loaded, "lines": sorted(lines)}))
"""


@cache
def prompt_alone() -> dict:
    """The modules that an engine with PyTorch and a greedy prompt have loaded, the lines that a second prompt runs, and
    the modules after a prompt with numba, in each dtype."""
    dtypes = ["float32", "bfloat16"] if find_spec("numba") else []
    command = [sys.executable, "-c", CODE, *dtypes]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(result.stdout.splitlines()[-1])


def topics(loaded: dict) -> set[str]:
    return {name for name in loaded if name.startswith("nanovllm.topics.")}


def test_a_greedy_prompt_loads_no_topic():
    """Nor a model family that is not that of the embedded model."""
    loaded = prompt_alone()["loaded"][0]
    assert topics(loaded) == set()
    assert not [name for name in loaded if "experts" in name]


def test_numba_loads_only_what_its_warm_up_needs():
    """In float32 nothing. In bfloat16 the warm-up has a penalty, which makes logits float32."""
    pytest.importorskip("numba")
    *_, first, second = prompt_alone()["loaded"]
    assert topics(first) == set()
    decoding = {"", ".drafts", ".masks", ".penalties", ".rules", ".structured"}
    allowed = {f"nanovllm.topics.decoding{name}" for name in decoding}
    assert topics(second) <= allowed


def test_a_greedy_prompt_loads_and_runs_few_lines():
    """Lines are counted without comments and docstrings. A user makes the SamplingParams: their file is not counted."""
    found = prompt_alone()
    loaded = found["loaded"][0]
    sizes = [size_of(Path(file).read_text(encoding="utf-8")) for file in loaded.values()]
    num_loaded = sum(size.lines for size in sizes)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"loads ([\d,]+) lines", readme)
    assert 0.99 * num_loaded < int(said.replace(",", "")) < 1.01 * num_loaded, num_loaded
    assert num_loaded <= 3280
    assert 300 < len(found["lines"]) <= 674, len(found["lines"])
    files = {file for file, _ in found["lines"]}
    assert len(files - {"sampling_params.py"}) <= 20, sorted(files)


@pytest.mark.parametrize("name", [name for name in MODULES if ".topics" not in name])
def test_the_core_imports_a_topic_only_where_it_is_asked_for(name):
    """Within a function: `grep -n topics nanovllm/*.py` is the map from the core to the topics."""
    if name == "nanovllm.__main__":
        return  # the command line is a topic
    early = imported(MODULES[name], everywhere=False)
    assert not {other for other in early if other.startswith("nanovllm.topics")}
