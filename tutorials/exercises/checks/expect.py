"""What the checks of all chapters share."""


class Wrong(Exception):
    """An answer is wrong. The error message has the number that was seen."""


def expect(holds: object, sentence: str) -> None:
    if not holds:
        raise Wrong(sentence)
