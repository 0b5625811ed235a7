"""Answers to the exercises of chapter 12 that must not pass: exercise, code, a part of what is said."""

WAITS = """
def waits(requests):
    ttft = [{ttft} for arrival, times in requests]
    tpot = [{tpot} for arrival, times in requests{only}]
    return {summary}(ttft), {summary}(tpot)
"""
TTFT = "times[0] - arrival"
TPOT = "(times[-1] - times[0]) / (len(times) - 1)"
ONLY = " if len(times) > 1"


def waits(ttft: str = TTFT, tpot: str = TPOT, only: str = ONLY, summary: str = "median") -> str:
    return WAITS.format(ttft=ttft, tpot=tpot, only=only, summary=summary)


SPEED = """
def speed(engine, prompts, max_tokens, rounds):
    for i in range({warm_ups}):
        engine.generate({first}, max_tokens, ignore_eos=True)
    speeds = []
    for r in range(1, rounds + 1):
        new = {new}
        begin = engine.now()
        lengths = engine.generate(new, max_tokens{option})
        speeds.append({tokens} / (engine.now() - begin))
    return {summary}
"""
SHIFTED = "[[(token + {}) % engine.vocab_size for token in prompt] for prompt in prompts]"


def speed(**changes: str) -> str:
    parts = {
        "warm_ups": "2",
        "first": SHIFTED.format("500 + i"),
        "new": SHIFTED.format("r"),
        "option": ", ignore_eos=True",
        "tokens": "sum(lengths)",
        "summary": "median(speeds)",
    }
    return SPEED.format(**parts | changes)


FREE = """
def free_tokens(shape, hardware, decodes, context):
    def is_free(n):
        items = [(1, context)] * decodes + [({item})]
        work = work_of(shape, items, sampled={sampled})
        return {flops} / hardware.flops_per_second <= {bytes} / hardware.bytes_per_second

    low, high = {low}, 1
    while is_free(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_free(middle) else (low, middle)
    return {result}
"""


def free(**changes: str) -> str:
    parts = {
        "item": "n, n",
        "sampled": "decodes",
        "flops": "work.flops",
        "bytes": "work.bytes",
        "low": "0",
        "result": "low",
    }
    return FREE.format(**parts | changes)


WRONG = {
    "it does not wait for the arrival": ("12.1", waits("times[0]"), "the median TTFT is 0.5 s"),
    "divided by all tokens": (
        "12.1",
        waits(tpot="(times[-1] - times[0]) / len(times)", only=""),
        "the median TPOT is 0.1 s",
    ),
    "a single token has a TPOT of 0": (
        "12.1",
        waits(tpot="(times[-1] - times[0]) / max(1, len(times) - 1)", only=""),
        "one of four has a single token: the median TPOT is 0.4 s",
    ),
    "a single token is divided by 0": ("12.1", waits(only=""), "ZeroDivisionError"),
    "the mean": (
        "12.1",
        waits(summary="(lambda x: sum(x) / len(x))"),
        "answers of 3, 2 and 5 tokens: the median TTFT is 0.3",
    ),
    "the median pause": (
        "12.1",
        waits(tpot="median(b - a for a, b in zip(times, times[1:]))"),
        "pauses of 1, 1 and 7 s: the median TPOT is 3 s",
    ),
    "from the arrival to the end": (
        "12.1",
        waits(tpot="(times[-1] - arrival) / len(times)"),
        "the median TPOT is 0.1 s",
    ),
    "not warm": ("12.2", speed(warm_ups="0"), "3 runs, and not 5"),
    "warmed up once": ("12.2", speed(warm_ups="1"), "4 runs, and not 5"),
    "the same prompts": ("12.2", speed(new="prompts"), "were in the prefix cache"),
    "warmed up with what counts": (
        "12.2",
        speed(first=SHIFTED.format("1")),
        "8 of 20 prompts were in the prefix cache",
    ),
    "out of the vocabulary": (
        "12.2",
        speed(new="[[token + r for token in prompt] for prompt in prompts]"),
        "token ids must be below 1000",
    ),
    "ends early": ("12.2", speed(option=""), "answers ended early"),
    "prompts count, too": (
        "12.2",
        speed(tokens="(sum(lengths) + sum(map(len, new)))"),
        "the median of 3 rounds is",
    ),
    "the mean of the rounds": ("12.2", speed(summary="sum(speeds) / rounds"), "and speed says"),
    "the slowest round": (
        "12.2",
        speed(summary="min(speeds)"),
        "and speed says",
    ),
    "a rule of thumb": (
        "12.3",
        "def free_tokens(shape, hardware, decodes, context): return int(hardware.ridge) - decodes",
        "445 tokens are free, and you say 294",
    ),
    "without attention": (
        "12.3",
        free(flops="(2 * shape.body * (decodes + n) + 2 * shape.head * decodes)"),
        "445 tokens are free",
    ),
    "the prompt draws, too": (
        "12.3",
        free(sampled="decodes + 1"),
        "445 tokens are free, and you say 444",
    ),
    "only the weights are read": ("12.3", free(bytes="work.weight_bytes"), "445 tokens are free"),
    "a chunk with the others' context": ("12.3", free(item="n, context + n"), "tokens are free"),
    "one too many": ("12.3", free(result="high"), "445 tokens are free, and you say 446"),
    "at least one": ("12.3", free(low="1"), "0 tokens are free, and you say 1"),
    "decodes only as tokens": (
        "12.3",
        """
def free_tokens(shape, hardware, decodes, context):
    work = work_of(shape, [(1, context)] * decodes, sampled=decodes)
    left = work.bytes / hardware.bytes_per_second - work.flops / hardware.flops_per_second
    return max(0, int(left * hardware.flops_per_second / (2 * shape.body)))
""",
        "445 tokens are free",
    ),
}
