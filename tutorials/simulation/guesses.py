"""Guesses in the simulator: how often they are right, told by real answers, and at which load they stop to pay.

    python -m tutorials.simulation.guesses

The embedded model answers questions of each kind once. Of each token of its answers it is known then what
prompt lookup would have guessed, and how much of it would have been right.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.decoding.guesses import Lookup, SpeculativeConfig
from nanovllm.simulator import Job, simulate
from tutorials.report import aligned
from tutorials.simulation.studies import latency
from tutorials.simulation.workloads import fixed, poisson, workload
from tutorials.tiny_qwen3 import data

TASKS = {"phone book": data.phone_book, "sort": data.sort, "story": data.story}
RATES = (2, 10, 20, 40, 60)  # requests per second
SERVER = Config(model="qwen3-8b", num_blocks=30_000, max_model_len=4096)
MOST = 8  # guesses that are looked at


def right_guesses(
    prompt: Sequence[int], answer: Sequence[int], config: SpeculativeConfig
) -> list[int]:
    """Before each token of the answer: how many guesses would be right, -1 if there would be none."""
    lookup = Lookup(config)
    found = []
    for i in range(len(answer)):
        guesses = lookup.guess([*prompt, *answer[:i]], MOST)
        right = 0
        while right < min(len(guesses), len(answer) - i) and guesses[right] == answer[i + right]:
            right += 1
        found.append(right if guesses else -1)
    return found


def recorded(task, count: int = 30) -> list[list[int]]:
    """The right guesses of so many answers of the embedded model."""
    rng = random.Random(0)
    chats = [[{"role": "user", "content": task(rng)[0]}] for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=120)
    outputs = LLM(kv_cache_gib=0.25).chat(chats, params, use_tqdm=False)
    config = SpeculativeConfig()
    return [
        right_guesses(one.prompt_token_ids, one.outputs[0].token_ids, config) for one in outputs
    ]


def load(rate: float, answers: list[list[int]], count: int = 300) -> list[Job]:
    """Prompts of 500 tokens, and answers of 200: recorded ones, joined until they are as long."""
    rng = random.Random(1)
    jobs = []
    for job in workload(poisson(rate), fixed(500, 200), count):
        guesses: list[int] = []
        while len(guesses) < job.num_outputs:
            guesses += rng.choice(answers)
        jobs.append(job._replace(right_guesses=tuple(guesses[: job.num_outputs])))
    return jobs


def rows(rates: Sequence[int] = RATES) -> list[list[str]]:
    """The mean latency of a request, without guesses and with four, by kind of answer and rate."""
    found = [["requests/s", "no guesses (s)", *[f"4, {name} (s)" for name in TASKS]]]
    answers = {name: recorded(task) for name, task in TASKS.items()}
    guessing = replace(SERVER, speculative_config={"num_speculative_tokens": 4})
    for rate in rates:
        plain = latency(simulate(load(rate, answers["story"]), SERVER))
        others = [latency(simulate(load(rate, one), guessing)) for one in answers.values()]
        found.append([str(rate), f"{plain:.2f}", *[f"{seconds:.2f}" for seconds in others]])
    return found


if __name__ == "__main__":
    print(aligned(rows()))
