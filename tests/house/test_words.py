"""Words that are not plain English, or not the field's: they do not come back. CONTRIBUTING.md has the style.

Run: pytest tests/house/test_words.py
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAIN = {  # what is wrong: what to write
    r"\b(the|a|its|at|from|each) begin\b": "start",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bdear\b": "expensive",
    r"\bfor ever\b": "forever",
    r"\bso many (tokens|requests|blocks|steps|bytes|seconds|seats|rounds|ranks)\b": "the number, or its name",
    r"\b1 (requests|threads|tokens|steps|sequences|replicas|ranks|blocks) (is|was|has|runs?|waits?)\b": "the singular",
    r"\bWho (waits|stops|comes|wants|reads|is)\b(?![^.]*\?)": "the request, the reader",
}
PAGES = [
    path
    for pattern in ("*.md", "nanovllm/**/*.py", "tutorials/**/*.md", "tutorials/**/*.py")
    for path in ROOT.glob(pattern)
    if not {"node_modules", "results"} & {*path.parts}
    and path.name != "data.py"  # what the model was trained on
]


@pytest.mark.parametrize("word", PLAIN)
def test_a_word_does_not_come_back(word):
    found = [
        f"{path.relative_to(ROOT)}:{i}: {line.strip()[:100]}"
        for path in PAGES
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(word, line) and not (path.name == "CONTRIBUTING.md" and line.startswith("|"))
    ]
    assert not found, f"write {PLAIN[word]!r}:\n" + "\n".join(found)
