"""What the checks of all chapters share."""


class Wrong(Exception):
    """An answer that does not hold, as a sentence with the number that was seen."""


def expect(holds: object, sentence: str) -> None:
    if not holds:
        raise Wrong(sentence)
