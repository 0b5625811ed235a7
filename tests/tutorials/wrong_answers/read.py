"""Answers to the exercises that must not pass, NN.txt for chapter NN. Three lines make one:

02.1 all full blocks hit
    (n - 1) // 16 => n // 16
    says: of 16 tokens 0 hit

The exercise and a name; what is replaced in the solution, which the chapter has folded away; a regular
expression for the sentence that the check says. There may be several replacements. Lines that follow
one belong to its new text, and are indented by four more than in the solution. An answer that is
another thought is written whole, without an arrow. right.txt has answers of another form that must
pass: the check says nothing.
"""

import re
from pathlib import Path
from typing import NamedTuple

ANSWER = re.compile(r"(\d\d(?:\.\d)?) (.+)\n((?: {4}.*\n)+?) {4}says: (.+)\n")
REPLACEMENT = re.compile(r"^(.+?) =>(?: |$)", re.MULTILINE)


class WrongAnswer(NamedTuple):
    exercise: str
    name: str
    text: str  # replacements, or the whole code
    says: str

    def code(self, solution: str) -> str:
        head, *changes = REPLACEMENT.split(self.text)
        if head:
            return self.text
        for old, new in zip(changes[::2], changes[1::2]):
            assert solution.count(old) == 1, f"{self.exercise} {self.name}: {old!r}, not once"
            solution = solution.replace(old, new.removesuffix("\n"))
        return solution


def wrong_answers(number: str) -> list[WrongAnswer]:
    """All of a chapter."""
    text = Path(__file__).with_name(f"{number}.txt").read_text(encoding="utf-8")
    found = []
    end = 0
    while end < len(text):
        match = ANSWER.match(text, end)
        assert match is not None, f"{number}.txt: {text[end : end + 100]!r} is no wrong answer"
        exercise, name, lines, says = match.groups()
        found.append(WrongAnswer(exercise, name, re.sub(r"^ {4}", "", lines, flags=re.M), says))
        end = match.end()
    return found
