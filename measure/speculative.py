"""`bench.py speculative`: tokens per second with and without guesses, one request at a time and many.

The embedded model answers what it has learnt: answers that are in their questions, answers that are
not, and stories. An engine for each number of guesses; all are alive and warm, and take turns. The
answers of all must be the same.
"""

import random
import time
from statistics import median

import torch

from nanovllm import LLM, SamplingParams
from tutorials.machine import device_name, environment, installed
from tutorials.report import aligned
from tutorials.tiny_qwen3 import data

NUM_GUESSES = (0, 1, 2, 4, 8)
AT_A_TIME = {1: 8, 8: 32, 64: 64}  # requests that run together -> requests in all
MOST_TOKENS = 100


def conversation(rng: random.Random) -> list[dict]:
    """Four questions about one phone book, three of them answered."""
    messages = []
    for question, answer in data.phone_book_turns(rng, 12, 4):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages[:-1]


def question_of(task):
    return lambda rng: [{"role": "user", "content": task(rng)[0]}]


TASKS = {
    "repeat": question_of(data.repeat),
    "sort": question_of(data.sort),
    "phone book": question_of(data.phone_book),
    "chat with history": conversation,
    "reverse": question_of(data.reverse),
    "story": question_of(data.story),
}


def answer(llm: LLM, chats: list, at_a_time: int) -> tuple[float, list, dict[str, float]]:
    """Seconds, the tokens of each answer, and what the engine counted."""
    params = SamplingParams(temperature=0, max_tokens=MOST_TOKENS)
    before = llm.stats()
    begin = time.perf_counter()
    outputs = []
    for i in range(0, len(chats), at_a_time):
        outputs += llm.chat(chats[i : i + at_a_time], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    counted = {name: value - before.get(name, 0) for name, value in llm.stats().items()}
    return seconds, [output.outputs[0].token_ids for output in outputs], counted


def measure(args) -> dict:
    """Prints a line for each task, and returns the report."""
    report, num_threads = environment(), torch.get_num_threads()
    engines = {}
    for k in NUM_GUESSES:
        options = dict(dtype=args.dtype, enable_prefix_caching=False) | dict(args.option)
        config = {"num_speculative_tokens": k} if k else None
        engines[k] = LLM(kv_cache_gib=0.5, speculative_config=config, **options)
    measured = []
    for name, make in TASKS.items():
        for at_a_time, num_requests in AT_A_TIME.items():
            rng = random.Random(at_a_time)
            chats = [make(rng) for _ in range(num_requests)]
            answers, runs = {}, {k: [] for k in NUM_GUESSES}
            for turn in range(args.repeat + 1):  # the first one warms up
                for k, llm in engines.items():
                    seconds, answers[k], counted = answer(llm, chats, at_a_time)
                    if turn > 0:
                        runs[k].append((seconds, counted))
            different = [k for k in NUM_GUESSES if answers[k] != answers[0]]
            if different:
                raise AssertionError(f"{name}: with {different} guesses, the answers are others")
            for k in NUM_GUESSES:
                counted = runs[k][-1][1]
                num_tokens = sum(map(len, answers[k]))
                accepted = counted.get("accepted_guesses", 0)
                measured.append({
                    "task": name,
                    "at_a_time": at_a_time,
                    "guesses": k,
                    "tokens": num_tokens,
                    "steps": counted["steps"],
                    "computed_tokens": counted["computed_tokens"],
                    "guessed": counted.get("guesses", 0),
                    "accepted": accepted,
                    "tokens_per_turn": num_tokens / (num_tokens - accepted),
                    "seconds": [seconds for seconds, _ in runs[k]],
                    "tokens_per_second": num_tokens / median(s for s, _ in runs[k]),
                })  # fmt: skip
    llm = engines[0]
    report |= {
        "device": device_name(llm.runner.device, num_threads),
        "model": "embedded",
        "dtype": str(llm.runner.dtype).removeprefix("torch."),
        "attention_backend": llm.runner.ops.__name__.rpartition(".")[2],
        "versions": {name: installed(name) for name in ("torch", "numba")},
        "speculative": measured,
    }
    show(report)
    return report


def rows(report: dict) -> list[list[str]]:
    """For chapter 22: tokens per second without guesses, and the gain with them."""
    found = [["answers", "at a time", "0 guesses"]]
    found[0] += [f"{k}" for k in NUM_GUESSES[1:]] + ["tokens in a step, with 4"]
    lines: dict[tuple, dict] = {}
    for row in report["speculative"]:
        lines.setdefault((row["task"], row["at_a_time"]), {})[row["guesses"]] = row
    for (task, at_a_time), by_guesses in lines.items():
        base = by_guesses[0]["tokens_per_second"]
        gains = [by_guesses[k]["tokens_per_second"] / base for k in NUM_GUESSES[1:]]
        cells = [
            task,
            str(at_a_time),
            f"{base:,.0f} tokens/s",
            *[f"x {gain:.2f}" for gain in gains],
        ]
        found.append([*cells, f"{by_guesses[4]['tokens_per_turn']:.2f}"])
    return found


def show(report: dict) -> None:
    print("Tokens per second without guesses, and how many times as many with 1, 2, 4 and 8\n")
    print(aligned(rows(report)))
