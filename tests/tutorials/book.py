"""What the tests of the book share: the chapters, the parts of a chapter's text, and the texts of a picture."""

import os
import re
from pathlib import Path

import pytest
from extras import needs

from tutorials.machine import interpreter_problem
from tutorials.words import FENCE, first_reading, num_words, prose

__all__ = ["FENCE", "first_reading", "num_words", "prose"]  # of tutorials.words

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "tutorials"
FIGURES = TUTORIALS / "figures"
WORDS = {  # of a first reading: outside code, tables and second readings
    **{"00_overview": 1200, "01_ladder": 2300, "02_blocks": 2200, "03_scheduler": 2100},
    **{"04_preemption": 1700, "05_model": 2600, "06_attention": 1900, "07_step": 1500},
    **{"08_sampler": 1900, "09_engine": 2200, "10_kernels": 2200, "11_graphs": 2500},
    **{"12_performance": 1500, "13_samples": 1300, "14_simulator": 1900, "15_believe": 1300},
    **{"16_policies": 2400, "17_serving": 2200, "18_parallel": 2400, "19_replicas": 2300},
    **{"20_vattention": 2000, "21_quantization": 1830, "22_speculative": 1300},
    **{"23_hybrid": 1800},
}
CHAPTERS = sorted(TUTORIALS.glob("[0-9]*.md"))
SOLUTION = re.compile(r"^```python \(solution (\d\d\.\d)\)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def solutions(chapter: Path) -> dict[str, str]:
    """The code of the folded solutions, by the name of the exercise."""
    return dict(SOLUTION.findall(chapter.read_text(encoding="utf-8")))


def needs_of(number: str) -> None:
    """Skips what is of a chapter that this system cannot run."""
    name = {"18": "register_at_fork", "20": "memfd_create"}.get(number, "name")
    if not hasattr(os, name):
        pytest.skip(f"os.{name} is not there")
    if number == "10":
        problem = interpreter_problem()
        if problem:
            pytest.skip(problem)
        needs("triton")
    if number in ("10", "11"):
        needs("numba")


def picture_texts(name: str) -> str:
    """What can be read in the picture, a line for each text: its program wrote it into the file."""
    data = (FIGURES / f"{name}.png").read_bytes()
    found = re.search(rb"(?s)(.{4})(tEXt|iTXt)Description\0+", data)
    assert found is not None, f"{name}.png has no texts"
    end = found.start() + 8 + int.from_bytes(found[1], "big")
    return data[found.end() : end].decode("utf-8" if found[2] == b"iTXt" else "latin-1")


def check_picture(name: str, *said: str) -> None:
    """The picture says this. Each is a whole line, or several lines."""
    whole = f"\n{picture_texts(name)}\n"
    missing = [text for text in said if f"\n{text}\n" not in whole]
    assert said and not missing, f"{name}.png does not say {missing}: {FIGURES}/README.md"
