"""Your answers to the exercises of chapter 12. To check them: python -m tutorials.check 12"""

from statistics import median

from nanovllm.topics.simulator.cost_model import Hardware, Shape, work_of


# --- 12.1 ---
def waits(requests: list[tuple[float, list[float]]]) -> tuple[float, float]:
    """The median TTFT and the median TPOT. A request is a pair: when it arrived, and when each of
    its tokens came. All times are seconds since the start of the run."""
    raise NotImplementedError


# --- 12.2 ---
def speed(engine, prompts: list[list[int]], max_tokens: int, rounds: int) -> float:
    """The median speed of an engine over `rounds` rounds, in tokens of answers per second, without
    the three mistakes.

    `engine.generate(prompts, max_tokens, ignore_eos=False)` returns the number of tokens of each
    answer. `engine.now()` is a clock, in seconds. Token ids are below `engine.vocab_size`. The
    first two calls of `generate` warm up.
    """
    raise NotImplementedError


# --- 12.3 ---
def free_tokens(shape: Shape, hardware: Hardware, decodes: int, context: int) -> int:
    """How many tokens of a new prompt a step can compute beside its decodes, each with `context`
    tokens of context, so that computing does not take longer than reading. 0 if it already does.

    Only the decodes draw a token.
    """
    raise NotImplementedError
