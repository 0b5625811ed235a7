"""Your answers to the exercises of chapter 09. To check them: python -m tutorials.check 09"""

from collections.abc import Callable, Iterator, Sequence

from nanovllm import LLM, SamplingParams


# --- 09.1 ---
def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text must wait, because a stop string may begin with
    them. No stop string is complete in the text."""
    raise NotImplementedError


# --- 09.2 ---
def culprits(names: list[str], fails: Callable[[list[str]], bool]) -> list[str]:
    """The requests that fail alone, in order. `fails(group)` runs a step with these requests, at
    least one. Call it with all first; if they do not fail, no request does."""
    raise NotImplementedError


# --- 09.3 ---
def stream_many(llm: LLM, prompts: list[str], params: SamplingParams) -> Iterator[tuple[int, str]]:
    """Pairs (number of the prompt, new text), each in the step in which the text becomes safe.

    Uses `llm.add_request`, `llm.step` and `llm.abort` only."""
    raise NotImplementedError
    yield  # so that it is a generator
