"""The parts of a step: all are measured, the tokens are those of an ordinary engine, and nothing is left running.

Run: pytest tests/tutorials/test_step_parts.py
"""

import json
import sys

from measure import step_parts


def test_the_parts_together_are_a_step():
    by_parts, ordinary = step_parts.new_engine(), step_parts.new_engine()
    for _ in range(5):
        step_parts.step_in_parts(by_parts)
        ordinary.step()
    texts = [
        [reply.output.outputs[0].token_ids for reply in llm.replies.unfinished.values()]
        for llm in (by_parts, ordinary)
    ]
    assert texts[0] == texts[1] and len(texts[0][0]) == 5


def test_two_steps(tmp_path, monkeypatch, capsys):
    path = tmp_path / "step_parts.json"
    monkeypatch.setattr(sys, "argv", ["step_parts", "--repeat", "2", "--json", str(path)])
    step_parts.main()
    prompt, decodes = json.loads(path.read_bytes())["steps"]
    assert (prompt["tokens"], decodes["tokens"]) == (58, 9)
    parts = ["tokens", "settle", "plan", "run", "update", "deliver"]
    assert list(prompt) == list(decodes) == parts and min(decodes.values()) > 0
    assert capsys.readouterr().out.startswith("58 tokens: settle ")
