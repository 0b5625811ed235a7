"""Your answers to the exercises of chapter 17. To check them: python -m tutorials.check 17"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

from nanovllm import LLM


# --- 17.1 ---
def texts(pieces: Iterable[bytes]) -> Iterator[str]:
    """The new text of each event of a stream, as soon as the event is complete.

    The pieces are the bytes of the stream as they come. It ends at [DONE]. Raises EOFError if the
    pieces end before.
    """
    raise NotImplementedError
    yield  # so that it is a generator


# --- 17.2 ---
class Left(Exception):
    """The client has hung up."""


async def unless_left(work: Coroutine, left: Coroutine) -> Any:
    """What `work` returns or raises. `left` ends when the client hangs up: if that is before, raises
    Left. Whatever happens, both have ended then."""
    raise NotImplementedError


# --- 17.3 ---

News = list[tuple[str, list[int], bool]]  # name, new token ids, whether these are the last


def run(llm: LLM, inbox: SimpleQueue, tell: Callable[[News], None]) -> None:
    """The engine's thread: serves what is in the inbox, until it takes None from it.

    Other messages: ("add", name, prompt, params) and ("leave", name).
    """
    raise NotImplementedError
