"""Answers to the exercises of chapter 09 that must not pass: exercise, code, a part of what is said."""

STREAM = """
def stream_many(llm, prompts, params):
    sent = {{llm.add_request(prompt, params): 0 for prompt in prompts}}
    numbers = {{name: i for i, name in enumerate(sent)}}
    running = {{*sent}}
    try:
        while running:
            for output in llm.step():
                name = output.request_id
                {foreign}
                text = output.outputs[0].text
                end = len(text)
                if output.finished:
                    running.remove(name)
                else:
                    {wait}
                if end > sent[name]:
                    yield numbers[name], text[sent[name] : end]
                    sent[name] = end
    finally:
        {leave}


def held_back(text, stops):
    heads = [stop[:length] for stop in stops for length in range(1, len(stop))]
    return max((len(head) for head in heads if text.endswith(head)), default=0)
"""
RIGHT = {
    "foreign": "if name not in running: continue",
    "wait": "end -= held_back(text, params.stop)",
    "leave": "for name in running: llm.abort(name)",
}

WRONG = {
    "only the first stop string": (
        "09.1",
        """
def held_back(text, stops):
    fits = [n for n in range(1, len(stops[0])) if text.endswith(stops[0][:n])]
    return max(fits, default=0)
""",
        "held_back",
    ),
    "the shortest": (
        "09.1",
        """
def held_back(text, stops):
    fits = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return min(fits, default=0)
""",
        "Up.nUs.* is 2, and should be 3",
    ),
    "always the longest stop string's": (
        "09.1",
        "def held_back(text, stops): return min(len(text), max(map(len, stops)) - 1)",
        "is 5, and should be 3",
    ),
    "from the first sign on": (
        "09.1",
        """
def held_back(text, stops):
    most = 0
    for stop in stops:
        begin = text.rfind(stop[0])
        if begin >= 0 and stop.startswith(text[begin:]) and len(stop) > len(text) - begin:
            most = max(most, len(text) - begin)
    return most
""",
        "held_back",
    ),
    "one after the other": (
        "09.2",
        """
def culprits(names, fails):
    return [name for name in names if fails([name])] if fails(names) else []
""",
        "steps were run; 9 are enough",
    ),
    "the other half must be it": (
        "09.2",
        """
def culprits(names, fails):
    if not fails(names):
        return []
    while len(names) > 1:
        half = len(names) // 2
        names = names[:half] if fails(names[:half]) else names[half:]
    return names
""",
        "fail.*: the culprits are",
    ),
    "only the first one": (
        "09.2",
        """
def culprits(names, fails):
    if not fails(names):
        return []
    if len(names) == 1:
        return names
    half = len(names) // 2
    return culprits(names[:half], fails) or culprits(names[half:], fails)
""",
        "'r3', 'r4'. fail: the culprits are",
    ),
    "the second of two must be it": (
        "09.2",
        """
def culprits(names, fails):
    if not fails(names):
        return []
    if len(names) == 1:
        return names
    half = len(names) // 2
    first = culprits(names[:half], fails)
    if half == 1 == len(names) - half and not first:
        return names[half:]
    return first + culprits(names[half:], fails)
""",
        "but only together: the culprits are",
    ),
    "all that fail together": (
        "09.2",
        "def culprits(names, fails): return names if fails(names) else []",
        "the culprits are ..r0.., and not",
    ),
    "everything at its end": (
        "09.3",
        """
def stream_many(llm, prompts, params):
    names = [llm.add_request(prompt, params) for prompt in prompts]
    ended = {}
    while len(ended) < len(names):
        for output in llm.step():
            if output.request_id in names and output.finished:
                ended[output.request_id] = True
                yield names.index(output.request_id), output.outputs[0].text
""",
        "after 1 steps, answer 0: '' was yielded, and 'a' is safe already",
    ),
    "generate, cut into pieces": (
        "09.3",
        """
def stream_many(llm, prompts, params):
    for i, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        for sign in output.outputs[0].text:
            yield i, sign
""",
        "was yielded, and 'a' is safe already",
    ),
    "the beginning of a stop string is sent": (
        "09.3",
        STREAM.format(**RIGHT | {"wait": "pass"}),
        "was yielded, but only .* is safe",
    ),
    "too much waits": (
        "09.3",
        STREAM.format(**RIGHT | {"wait": "end -= max(map(len, params.stop)) - 1"}),
        "is safe already",
    ),
    "nobody is aborted": ("09.3", STREAM.format(**RIGHT | {"leave": "pass"}), "in the engine"),
    "there is nobody else": (
        "09.3",
        STREAM.format(**RIGHT | {"foreign": "pass"}),
        "line .*KeyError",
    ),
    "until everybody has ended": (
        "09.3",
        STREAM.format(**RIGHT).replace("while running:", "while llm.has_unfinished():"),
        "ends in step .*, but you have run 100 steps",
    ),
    "one stream after the other": (
        "09.3",
        """
def stream_many(llm, prompts, params):
    for i, prompt in enumerate(prompts):
        for new in llm.stream(prompt, params):
            yield i, new
""",
        "was yielded, and .* is safe already",
    ),
}
