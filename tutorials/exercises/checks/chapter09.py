"""Checks of chapter 09: what must wait, which requests fail, many streams at once."""

import random
from itertools import pairwise
from math import ceil, log2

from nanovllm import LLM, SamplingParams
from nanovllm.processing.outputs import CompletionOutput
from nanovllm.processing.text import Text
from tutorials.exercises.checks.expect import expect

STOPS = ["\nUser:", "END"]
SCRIPTS = {  # what is said to each prompt
    "one": "a fox 😀\nUp\nUser: hi",
    "two": "\nUsEND of it",
    "three": "ENEN 😀😀 EN",
    "four": "\n\nUser\nUser:",
    "five": "short and no END",
}
PROMPTS = [*SCRIPTS, "two"]  # two are equal
NUM_TOKENS = 14


def check_1(answers) -> None:
    rng = random.Random(0)
    cases = [
        ("Up\nUs", ["\nUser:", "Us!"]),
        ("Up", ["\nUser:"]),
        ("", ["END"]),
        ("EN", ["END"]),
        ("ENDE", ["ENDEN!"]),
        ("the E", ["x", "END"]),
        ("stop", ["s"]),
        ("the end of a long", ["the end of a long, long text"]),
        ("a" + 70 * "x", ["a" + 80 * "x"]),
    ]
    for _ in range(300):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 3))]
        text = ""
        while len(text) < 8 and not any(stop in text + "a" for stop in stops):
            text += "a" if rng.random() < 0.5 or any(s in text + "b" for s in stops) else "b"
        cases.append((text, stops))
    for text, stops in cases:
        heads = [stop[:n] for stop in stops for n in range(1, len(stop))]
        most = max((len(head) for head in heads if text.endswith(head)), default=0)
        said = answers.held_back(text, tuple(stops))
        expect(said == most, f"held_back({text!r}, {stops}) is {said}, and should be {most}")


# --- 09.2 ---
def judge(answers, n: int, guilty: list[int], pairs: bool = False, times: float = 10**9) -> None:
    """Of n requests these fail: each alone, or only as a pair; the fault comes so many times."""
    names = [f"r{i}" for i in range(n)]
    bad = {names[i] for i in guilty}
    num_calls = num_faults = 0

    def fails(group: list[str]) -> bool:
        nonlocal num_calls, num_faults
        expect(len(group) > 0, "a step without requests was run")
        num_calls += 1
        expect(num_calls <= 4 * n + 4, f"{n} requests, and {num_calls} steps are not enough")
        is_bad = bad <= {*group} if pairs else bad & {*group}
        num_faults += bool(is_bad)
        return bool(is_bad) and num_faults <= times

    said = answers.culprits([*names], fails)
    wanted = [] if pairs or times == 1 else sorted(bad, key=names.index)
    what = f"of {n} requests {sorted(bad, key=names.index)} fail"
    if times == 1:
        what = f"one of {n} requests fails once, and never again"
    elif pairs:
        what += ", but only together"
    expect(said == wanted, f"{what}: the culprits are {wanted}, and not {said}")
    most = 2 * max(1, len(guilty)) * ceil(log2(n)) + 1
    if not pairs:
        expect(num_calls <= most, f"{what}: {num_calls} steps were run; {most} are enough")


def check_2(answers) -> None:
    for i in range(16):
        judge(answers, 16, [i])
    judge(answers, 1, [0])
    judge(answers, 11, [10])
    judge(answers, 64, [37])
    judge(answers, 64, [])
    judge(answers, 16, [3, 4])
    judge(answers, 16, [0, 7, 15])
    judge(answers, 4, [0, 1, 2, 3])
    judge(answers, 6, [1, 3])  # in halves of three, r3 is alone before r1 is
    judge(answers, 13, [2, 5, 6])
    for i in (0, 9, 15):
        judge(answers, 16, [i], times=1)
    judge(answers, 16, [2, 12], pairs=True)
    for i in range(10):
        judge(answers, 11, [i, i + 1], pairs=True)  # halving parts some of them last


# --- 09.3 ---
class Script:
    """In the place of the model: what it says to each prompt."""

    num_blocks, num_host_blocks = 256, 0

    def __init__(self) -> None:
        self.tokens: dict[str | None, list[int]] = {}

    def launch(self, schedule):
        drawn = []
        for seq in schedule.sampled:
            tokens = self.tokens.get(seq.request.prompt, [])
            i = seq.num_output_tokens
            drawn.append(tokens[i] if i < len(tokens) else 11)
        return lambda: (drawn, None)


def new_engine() -> LLM:
    script = Script()
    llm = LLM(runner=script)
    script.tokens = {prompt: llm.tokenizer.encode(text) for prompt, text in SCRIPTS.items()}
    return llm


def safe_texts(llm: LLM, prompt: str, params: SamplingParams) -> list[str]:
    """What may be sent before the first step, and after each one."""
    output = CompletionOutput(0)
    text = Text(llm.tokenizer.backend_tokenizer, output, params)
    (whole,) = llm.generate(prompt, params, use_tqdm=False)
    safe = [""]
    for token in whole.outputs[0].token_ids:
        text.add(token)
        safe.append(output.text[: text.num_safe_chars])
    safe[-1] = whole.outputs[0].text
    return safe


def num_changes(safe: list[str]) -> int:
    return sum(a != b for a, b in pairwise(safe))


def check_3(answers) -> None:
    params = SamplingParams(stop=STOPS, max_tokens=NUM_TOKENS)
    wanted = [safe_texts(new_engine(), prompt, params) for prompt in PROMPTS]
    llm = new_engine()
    llm.add_request("somebody else's", SamplingParams(max_tokens=100))
    texts = [""] * len(PROMPTS)
    snapshots: list[list[str]] = []  # what has been yielded before each step's text
    llm.observers.append(lambda schedule, seconds: snapshots.append([*texts]))
    for i, new in answers.stream_many(llm, PROMPTS, params):
        texts[i] += new
        expect(len(snapshots) <= 200, "it still yields after 200 steps")
    num_steps = len(snapshots)
    for step, snapshot in enumerate([*snapshots, texts]):
        for i, (mine, safe) in enumerate(zip(snapshot, wanted)):
            right = safe[min(step, len(safe) - 1)]
            where = f"after {step} steps, answer {i}: {mine!r} was yielded"
            expect(right.startswith(mine), f"{where}, but only {right!r} is safe")
            expect(mine == right, f"{where}, and {right!r} is safe already")
    longest = max(map(len, wanted)) - 1
    said = f"the last of all answers ends in step {longest}, but you have run {num_steps} steps"
    expect(num_steps == longest, said)
    check_leaving(answers, params, 1)
    check_leaving(answers, params, sum(map(num_changes, wanted)) - 1)  # all but one have ended


def check_leaving(answers, params: SamplingParams, num_pieces: int) -> None:
    """A reader that leaves after so many pieces, while another reader's request goes on."""
    llm = new_engine()
    llm.add_request("somebody else's", SamplingParams(max_tokens=100), "other")
    stream = answers.stream_many(llm, PROMPTS, params)
    for _ in range(num_pieces):
        next(stream)
    stream.close()
    llm.step()
    left = [*llm.requests]
    expect(left == ["other"], f"the reader has left, but {len(left)} requests are in the engine")
