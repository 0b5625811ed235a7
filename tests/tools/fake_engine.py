"""Engines with the model of fake_model.py, so that a token that depends on a wrong slot is a wrong token; and requests of
all kinds, with the answers that each gets alone.

Tests import this file. An example that does: pytest tests/core/test_recovery.py
"""

import threading
from functools import cache

from fake_model import FakeRunner

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.checks.schedules import ScheduleChecks

VOCAB_SIZE = 1536
SETTINGS = {
    "plenty": {},
    "scarce": dict(num_blocks=36),
    "swap": dict(num_blocks=36, num_host_blocks=200),
    "scarce, no cache": dict(num_blocks=36, enable_prefix_caching=False),
}


class Boom(Exception):
    """A fault of a test's making."""


def new_llm(num_blocks=1000, num_host_blocks=0, **kwargs) -> LLM:
    mode = "swap" if num_host_blocks else "recompute"
    options = dict(block_size=4, max_num_batched_tokens=40, preemption_mode=mode) | kwargs
    runner = FakeRunner(options["block_size"], VOCAB_SIZE, num_blocks, num_host_blocks)
    llm = LLM(runner=runner, max_num_seqs=12, max_model_len=100, num_blocks=num_blocks, **options)
    if not llm.overlaps:  # checks also the engine's own scheduler
        llm.planner = ScheduleChecks(llm.scheduler, llm.limits, llm.states.unfinished)
    return llm


def result(output) -> list:
    return [(o.token_ids, o.text, o.finish_reason, o.cumulative_logprob) for o in output.outputs]


def answer(prompt, params) -> list:
    """What the request gets alone."""
    return result(new_llm().generate([prompt], params, use_tqdm=False)[0])


def go_on(llm, most_steps=5000) -> dict:
    """Steps until all requests have ended; their outputs by id."""
    outputs = {}
    for _ in range(most_steps):
        if not llm.has_unfinished():
            return outputs
        outputs |= {output.request_id: output for output in llm.step()}
    raise AssertionError("it does not end")


def check_clean(llm) -> None:
    """Nothing is left, once what was aborted has been settled."""
    while llm.has_unfinished():
        assert all(output.finished for output in llm.step())
        assert not llm.requests
    llm.step()
    assert not llm.requests and not llm.scheduler.has_unfinished()
    assert not llm.recovery.is_changing and not llm.recovery.suspects
    assert not llm.inbox.submitted and not llm.inbox.unwanted
    check_blocks(llm.block_manager, [])  # all are free


def hooked(name: str, hook) -> type[Scheduler]:
    """A scheduler that calls `hook(scheduler, *args)` before one of its methods."""

    def method(self, *args):
        hook(self, *args)
        return getattr(Scheduler, name)(self, *args)

    return type("Hooked", (Scheduler,), {name: method})


def in_threads(*functions) -> None:
    """Runs them beside each other; an error of one fails the test."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


# --- requests with their answers ---


@cache
def answered_requests() -> dict:
    """By id: prompt, parameters, and what the request gets alone, with all the memory there is. Prompts begin alike; some
    requests are greedy, others have samples, beams, a stop string in the middle of their text."""
    stem = list(range(300, 321))
    asked = {
        "plain": ([5] * 9, SamplingParams(temperature=0, max_tokens=12, seed=1)),
        "samples": (stem, SamplingParams(n=3, seed=2, max_tokens=14)),
        "shared": ([*stem, 7, 7], SamplingParams(seed=3, max_tokens=9)),
        "beams": ([*stem, 8], BeamSearchParams(beam_width=3, max_tokens=8)),
        "twin": (stem, SamplingParams(n=2, seed=4, max_tokens=10)),
        "long": (list(range(500, 570)), SamplingParams(seed=5, max_tokens=12)),
    }
    ((_, text, _, _),) = answer(list(range(40)), SamplingParams(seed=6, max_tokens=20))
    stop = text[len(text) // 2 :][:4]
    asked["stop"] = list(range(40)), SamplingParams(seed=6, max_tokens=20, stop=stop)
    answered = {name: (*request, answer(*request)) for name, request in asked.items()}
    ((token_ids, _, reason, _),) = answered["stop"][2]
    assert reason == "stop" and len(token_ids) < 20
    return answered


def add_all(llm) -> None:
    for name, (prompt, params, _) in answered_requests().items():
        llm.add_request(prompt, params, name)


def check_others(outputs: dict, *culprits: str) -> None:
    """The culprits have their error, and all others their answers."""
    assert outputs.keys() == answered_requests().keys()
    for name, output in outputs.items():
        assert output.finished
        if name in culprits:
            assert isinstance(output.error, Boom)
            assert "error" in {o.finish_reason for o in output.outputs}
        else:
            assert output.error is None and result(output) == answered_requests()[name][2], name
