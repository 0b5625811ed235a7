"""Answers to the exercises of chapter 01 that must not pass: exercise, code, a part of what is said."""

SHRINKING = """
def generate(model, requests, report):
    sequences = [Sequence(request) for request in requests]
    for i in range(0, len(sequences), SEATS):
        running = sequences[i : i + SEATS]
        longest = max(seq.length for seq in running) + 20
        cache = torch.zeros(2, len(model.layers), len(running), longest, model.kv_heads, model.dim)
        while running:
            sizes = step(model, cache, running)
            report([seq.request for seq in running], sizes)
            running = [seq for seq in running if len(seq.ids) < seq.length]
            CACHE
    return [seq.ids[len(seq.request.prompt) :] for seq in sequences]
"""

PLAN = """
def plan(running, waiting, free):
    while waiting and len(running) < SEATS and grow(waiting[0], free):
        running.append(waiting.pop(0))
"""
TURNS = (
    PLAN
    + """
    left = BUDGET
    for seq in running:
        seq.new = 0
    while left and any(len(seq.ids) - seq.computed > seq.new for seq in running):
        for seq in running:
            more = min(16, left, len(seq.ids) - seq.computed - seq.new)
            seq.new += more
            left -= more
"""
)

WRONG = {
    "one step too many": (
        "01.1",
        "def cells(prompts, answers): return len(prompts) * (max(prompts) + max(answers))",
        "rung 3 computes 208, you say 212",
    ),
    "no padding": (
        "01.1",
        "def cells(prompts, answers): return sum(prompts) + sum(answers) - len(prompts)",
        "rung 3 computes 208, you say 112",
    ),
    "all stay": (
        "01.2",
        "from tutorials.ladder.rung3 import generate",
        "202 tokens would do, yours computes 208",
    ),
    "rows leave, the cache keeps them": (
        "01.2",
        SHRINKING.replace("CACHE", "cache = cache[:, :, : len(running)]"),
        r"request \d: rung 3 answers",
    ),
    "the first prompt takes all": (
        "01.3",
        "from tutorials.ladder.rung6 import plan",
        "the prompt of 20 tokens gets its first tokens in step 9",
    ),
    "16 tokens each, and the rest is left": (
        "01.3",
        PLAN
        + """
    for seq in running:
        seq.new = min(16, len(seq.ids) - seq.computed)
""",
        "the long prompt is complete in step",
    ),
    "the shortest first": (
        "01.3",
        PLAN
        + """
    left = BUDGET
    for seq in sorted(running, key=lambda seq: len(seq.ids) - seq.computed):
        seq.new = min(left, len(seq.ids) - seq.computed)
        left -= seq.new
""",
        "the prompt of 513 tokens gets 2 tokens in step 1, 16 are its share",
    ),
    "answers wait behind prompts": (
        "01.3",
        TURNS,
        "an answer gets no token",
    ),
    "one turn, and the first gets the rest": (
        "01.3",
        PLAN
        + """
    left = BUDGET
    for seq in running:
        seq.new = 0
    for most in (1, 16, 64):
        for seq in running:
            lacks = len(seq.ids) - seq.computed - seq.new
            more = min(most, left, lacks) if most > 1 or lacks == 1 else 0
            seq.new += more
            left -= more
""",
        "two prompts of 200 tokens share 64 as",
    ),
    "no budget": (
        "01.3",
        PLAN
        + """
    for seq in running:
        seq.new = len(seq.ids) - seq.computed
""",
        "a step computes 575 tokens, the budget is 64",
    ),
    "nothing is computed": (
        "01.3",
        PLAN
        + """
    for seq in running:
        seq.new = 0
""",
        "Error",
    ),
}
