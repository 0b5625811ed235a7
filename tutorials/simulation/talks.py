"""Conversations so small that each turn can be looked at: chapter 19 sends them to replicas.

jobs = talks("ABC")
run = simulate(jobs, Config(model="qwen3-8b"), replicas=2)
print_turns(run, "ABC")
"""

from nanovllm import Job, Run
from tutorials.simulation.metrics import ttft

TEXT, QUESTION, ANSWER = 960, 240, 160  # tokens; the first question is about a text
TURNS = 3  # of each user
THINKING = 2.0  # seconds between an answer and the next question


def talks(users: str, instructions: int = 0) -> list[Job]:
    """One conversation for each letter, a second apart. Each prompt is all that was said, and a new
    question. All begin with the same instructions, of this number of tokens."""
    common = ((len(users) + 1, instructions),) if instructions else ()
    jobs = list[Job]()
    for i in range(len(users)):
        said = common
        for turn in range(TURNS):
            after = len(jobs) - 1 if turn else None
            time = THINKING if turn else float(i)
            prompt = (*said, (i + 1, QUESTION if turn else TEXT))
            jobs.append(Job(time, prompt, ANSWER, answer=i + 1, after=after))
            said = jobs[-1].conversation
    return jobs


def print_turns(run: Run, users: str) -> None:
    """A line for each user: to which replica each turn went, and what was not in its cache."""
    for i, user in enumerate(users):
        turns = run.requests[i * TURNS : (i + 1) * TURNS]
        cells = [f"replica {one.replica} computes {num_computed(one):5,}" for one in turns]
        print(f"{user}:", ", ".join(cells))
    computed = run.num_prompt_tokens - run.num_cached_tokens
    late = 1e3 * sum(map(ttft, run.requests)) / len(run.requests)
    print(
        f"{computed:,} of {run.num_prompt_tokens:,} prompt tokens, first token after {late:.1f} ms"
    )


def num_computed(served) -> int:
    return served.job.num_prompt_tokens - served.num_cached_tokens
