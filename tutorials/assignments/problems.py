"""What can be wrong with a student's file.

Each problem has a message for the student, and a kind. The message says the step, the line and
whatever the file says. A file can tell with each of them what it has seen: the line in which it
fails may be the length of a prompt. So of a secret load only the kind is said."""

from enum import Enum


class Kind(Enum):
    """All that is ever said of what went wrong in a secret load."""

    RAISED = "your code has raised an exception"
    RULE = "a rule is broken"
    NO_DECISION = "your process has sent what is no decision"
    STILL_WAITING = "there are requests that get no more tokens"
    SILENT = "your file has not answered in time"
    TOO_LATE = "your file has taken too much time in all"
    ENDED = "your process has ended by itself"
    GRADER_FAILED = "the grader has failed, tell your instructor"


class Broken(Exception):
    """The student's process has failed. The message is for the student."""

    def __init__(self, kind: Kind, sentence: str = ""):
        super().__init__(sentence or kind.value)
        self.kind = kind
