"""Answers to the exercises of chapter 08 that must not pass: exercise, code, a part of what is said."""

FILTERED = """
def filtered(probs, temperature, min_p, top_k, top_p):
    weights = [p ** (1 / temperature) for p in probs]
    total = sum(weights)
    weights = [w / total for w in weights]
    ids = sorted(range(len(probs)), key=lambda i: -weights[i])
    {min_p}
    if top_k:
        ids = ids[:top_k]
    total = {total}
    kept, before = [], 0
    for i in ids:
        {top_p}
            break
        kept.append(i)
        before += weights[i]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(probs))]
"""
MIN_P = "ids = [i for i in ids if weights[i] >= min_p * weights[ids[0]]]"
TOTAL = "sum(weights[i] for i in ids)"
TOP_P = "if before >= top_p * total:"

GUMBEL = """
def gumbel_tokens(logits, seed, position, uniform):
    ids = torch.arange(logits.shape[1])
    u = uniform({keys})
    return (logits - (-u.log()).log()).argmax(1)
"""
KEYS = "seed.unsqueeze(1), position.unsqueeze(1) * len(ids) + ids"

HALVING = """
def lowest_kept(probs, top_p):
    low = torch.zeros(len(probs), 1, dtype=probs.dtype)
    high = torch.ones_like(low) * 2
    for _ in range({rounds}):
        guess = (low + high) / 2
        is_enough = torch.where(probs >= guess, probs, 0).sum({dim}, keepdim=True) {compare} top_p
        low = torch.where(is_enough, guess, low)
        high = torch.where(is_enough, high, guess)
    return {result}
"""
RIGHT = {"rounds": 64, "dim": 1, "compare": ">=", "result": "low"}

WRONG = {
    "top_p of all": ("08.1", FILTERED.format(min_p=MIN_P, total="1.0", top_p=TOP_P), "0.9"),
    "the word that reaches top_p goes": (
        "08.1",
        FILTERED.format(min_p=MIN_P, total=TOTAL, top_p="if before + weights[i] > top_p * total:"),
        "0.9",
    ),
    "min_p is no fraction": (
        "08.1",
        FILTERED.format(
            min_p="ids = [i for i in ids if weights[i] >= min_p]", total=TOTAL, top_p=TOP_P
        ),
        "0.2, 0, 1.0",
    ),
    "exactly min_p goes": (
        "08.1",
        FILTERED.format(min_p=MIN_P.replace(">=", ">"), total=TOTAL, top_p=TOP_P),
        r"0.125\], 1.0, 0.5, 0, 1.0",
    ),
    "the list is taken as sorted": (
        "08.1",
        FILTERED.format(min_p=MIN_P, total=TOTAL, top_p=TOP_P).replace(
            "sorted(range(len(probs)), key=lambda i: -weights[i])", "[*range(len(probs))]"
        ),
        r"\[0.04, 0.25",
    ),
    "neighbors share noise": (
        "08.2",
        GUMBEL.format(keys="seed.unsqueeze(1), position.unsqueeze(1) + ids).clamp(min=2**-24"),
        "a position and the next hang together",
    ),
    "seeds share noise": (
        "08.2",
        GUMBEL.format(keys="seed.unsqueeze(1) + ids, position.unsqueeze(1)).clamp(min=2**-24"),
        "a seed and the next hang together",
    ),
    "seed and position are added": (
        "08.2",
        GUMBEL.format(keys="(seed + position).unsqueeze(1), ids).clamp(min=2**-24"),
        "a seed and the next, one position earlier hang together",
    ),
    "answers of a request share noise": (
        "08.2",
        GUMBEL.format(
            keys="seed.unsqueeze(1) + ids * -0x61C8864680B583EB, position.unsqueeze(1)).clamp(min=2**-24"
        ),
        "two answers of one request hang together",
    ),
    "u = 0 is forgotten": ("08.2", GUMBEL.format(keys=KEYS), "if u is 0.0000000 it draws 0"),
    "u is taken from the other end": (
        "08.2",
        GUMBEL.format(keys=KEYS).replace("-u.log()", "-(1 - u).log()"),
        "if u is 0.0000000 it draws",
    ),
    "small numbers become equal": (
        "08.2",
        GUMBEL.format(keys=f"{KEYS}).clamp(min=0.01"),
        "the first of two equal tokens wins 100%",
    ),
    "small numbers become equal, 0.000001": (
        "08.2",
        GUMBEL.format(keys=f"{KEYS}).clamp(min=1e-6"),
        "the first of two equal tokens wins",
    ),
    "a constant below the size of the vocabulary": (
        "08.2",
        GUMBEL.format(
            keys="seed.unsqueeze(1), position.unsqueeze(1) * 100_003 + ids).clamp(min=2**-24"
        ),
        "with 151,936 tokens, 103,866 of 607,744 numbers are used twice",
    ),
    "one number for all tokens": (
        "08.2",
        GUMBEL.format(keys="seed, position).unsqueeze(1).clamp(min=2**-24"),
        "drawn 1.000 of the time",
    ),
    "a generator with a state": (
        "08.2",
        """
generator = torch.Generator().manual_seed(0)
def gumbel_tokens(logits, seed, position, uniform):
    u = torch.rand(logits.shape, generator=generator).clamp(min=2**-24)
    return (logits - (-u.log()).log()).argmax(1)
""",
        "in a batch, and .* alone",
    ),
    "one row's number": (
        "08.2",
        GUMBEL.format(keys="seed[:1, None], position[:1, None] * len(ids) + ids).clamp(min=2**-24"),
        "of the time",
    ),
    "few rounds": ("08.3", HALVING.format(**RIGHT | {"rounds": 10}), "tokens are kept"),
    "the wrong end": ("08.3", HALVING.format(**RIGHT | {"result": "high"}), "tokens are kept"),
    "more than top_p": ("08.3", HALVING.format(**RIGHT | {"compare": ">"}), "top_p 0.75"),
    "one cutoff for all rows": (
        "08.3",
        HALVING.format(**RIGHT | {"dim": "None"}).replace(">= top_p", ">= top_p * len(probs)"),
        "tokens are kept",
    ),
    "too few rounds for the tail": ("08.3", HALVING.format(**RIGHT | {"rounds": 40}), "tiny"),
    "a sort by NumPy": (
        "08.3",
        """
import numpy
def lowest_kept(probs, top_p):
    ranked = torch.from_numpy(-numpy.sort(-probs, axis=1))
    return ranked.masked_fill(ranked.cumsum(1) - ranked >= top_p, 2).amin(1, keepdim=True)
""",
        "it leaves torch",
    ),
    "a sort by NumPy, of an array": (
        "08.3",
        """
import numpy
def lowest_kept(probs, top_p):
    ranked = torch.from_numpy(-numpy.sort(-probs.numpy(), axis=1))
    return ranked.masked_fill(ranked.cumsum(1) - ranked >= top_p, 2).amin(1, keepdim=True)
""",
        "it leaves torch",
    ),
    "a loop over rows": (
        "08.3",
        """
def lowest_kept(probs, top_p):
    lowest = []
    for row in probs:
        ranked = sorted(row.tolist(), reverse=True)
        total, i = 0, -1
        while total < top_p:
            i += 1
            total += ranked[i]
        lowest.append([ranked[i]])
    return torch.tensor(lowest, dtype=probs.dtype)
""",
        "in a loop",
    ),
    "a sort": (
        "08.3",
        """
def lowest_kept(probs, top_p):
    ranked = probs.sort(1, descending=True).values
    return ranked.masked_fill(ranked.cumsum(1) - ranked >= top_p, 2).amin(1, keepdim=True)
""",
        "it sorts",
    ),
}
