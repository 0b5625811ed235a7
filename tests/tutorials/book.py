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
    **{"00_overview": 1220, "01_ladder": 2300, "02_blocks": 2100, "03_scheduler": 1500},
    **{"04_preemption": 1450, "05_model": 1900, "06_attention": 1550, "07_step": 1200},
    **{"08_sampler": 1650, "09_engine": 1600, "10_kernels": 1800, "11_graphs": 1400},
    **{"12_performance": 1550, "13_samples": 1200, "14_simulator": 1350, "15_believe": 950},
    **{"16_policies": 1550, "17_serving": 1450, "18_parallel": 1550, "19_replicas": 1350},
    **{"20_vattention": 1120, "21_quantization": 1550, "22_speculative": 1150},
    **{"23_hybrid": 1400},
}
CHAPTERS = sorted(TUTORIALS.glob("[0-9]*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
SOLUTION = re.compile(r"^```python \(solution (\d\d\.\d)\)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def pattern(expected: str) -> str:
    lines = [re.escape(line.rstrip()) for line in expected.rstrip().splitlines()]
    return (
        "\n".join(lines)
        .replace(re.escape("...") + "\n", "(?:.*\n)*")
        .replace("\n" + re.escape("..."), "(?:\n.*)*")
    )


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
