"""Answers to the exercises of chapter 06 that must not pass: exercise, code, a part of what is said."""

CHUNK = """
def chunk(q, k, v):
    m, heads, dim = q.shape
    n, kv_heads, _ = k.shape
    grouped = q.view(m, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("mhgd,nhd->hgmn", grouped, k){scale}
    position = torch.arange(n)
    scores = scores.masked_fill({hidden}, -torch.inf)
    return torch.einsum("hgmn,nhd->mhgd", scores.softmax(-1), v).reshape(q.shape)
"""
HIDDEN = "position > position[-m:, None]"
ONLINE = """
def block_by_block(q, blocks):
    largest = torch.tensor({start})
    total = torch.tensor(0.0)
    out = torch.zeros_like(q)
    for k, v in blocks:
        scores = k @ q / len(q) ** 0.5
        new = {new}
        weights = (scores - new).exp()
        factor = {factor}
        total = total * factor + weights.sum()
        out = out * {out_factor} + weights @ v
        largest = new
    return out / total
"""
RIGHT = dict(
    start="-torch.inf",
    new="torch.maximum(largest, scores.max())",
    factor="(largest - new).exp()",
    out_factor="factor",
)

WRONG = {
    "keys are copied for one head after the other": (
        "06.2",
        """
def chunk(q, k, v):
    m, heads, dim = q.shape
    n, group = len(k), heads // k.shape[1]
    is_future = torch.arange(n) > torch.arange(n - m, n)[:, None]
    out = torch.empty_like(q)
    for head in range(heads):
        own_k, own_v = k[:, head // group].clone(), v[:, head // group].clone()
        scores = (q[:, head] @ own_k.T / dim**0.5).masked_fill(is_future, -torch.inf)
        out[:, head] = scores.softmax(-1) @ own_v
    return out
""",
        "numbers were copied, one head after the other",
    ),
    "all blocks are kept": (
        "06.3",
        """
def block_by_block(q, blocks):
    pairs = [(k.clone(), v.clone()) for k, v in blocks]
    scores = torch.stack([row @ q for k, _ in pairs for row in k]) / len(q) ** 0.5
    weights = scores.softmax(0)
    rows = [row for _, v in pairs for row in v]
    return sum(weight * row for weight, row in zip(weights, rows))
""",
        "numbers were copied: blocks are to be used, and not kept",
    ),
    "slots behind the end have an owner": (
        "06.1",
        """
def owner(slot, tables, contexts, block_size):
    for b, table in enumerate(tables):
        if slot // block_size in table:
            return b, table.index(slot // block_size) * block_size + slot % block_size
    return None
""",
        r"slot 6 of blocks of 4, .*: None, you say \(2, 10\)",
    ),
    "blocks in the order of the cache": (
        "06.1",
        """
def owner(slot, tables, contexts, block_size):
    for b, (table, n) in enumerate(zip(tables, contexts)):
        if slot // block_size in table:
            i = sorted(table).index(slot // block_size) * block_size + slot % block_size
            return (b, i) if i < n else None
    return None
""",
        r"you say",
    ),
    "block sizes are always four": (
        "06.1",
        """
def owner(slot, tables, contexts, block_size):
    for b, (table, n) in enumerate(zip(tables, contexts)):
        if slot // 4 in table:
            i = table.index(slot // 4) * 4 + slot % 4
            return (b, i) if i < n else None
    return None
""",
        r"you say",
    ),
    "the triangle is in the left corner": (
        "06.2",
        CHUNK.format(scale=" / dim**0.5", hidden="position > torch.arange(m)[:, None]"),
        r"4 queries in a context of 40, .* queries \[0, 1, 2, 3\] are wrong",
    ),
    "neighboring heads have different keys": (
        "06.2",
        """
def chunk(q, k, v):
    m, heads, dim = q.shape
    n, kv_heads, _ = k.shape
    grouped = q.view(m, heads // kv_heads, kv_heads, dim)
    scores = torch.einsum("mghd,nhd->ghmn", grouped, k) / dim**0.5
    position = torch.arange(n)
    scores = scores.masked_fill(position > position[-m:, None], -torch.inf)
    return torch.einsum("ghmn,nhd->mghd", scores.softmax(-1), v).reshape(q.shape)
""",
        "7 queries in a context of 7, .* are wrong",
    ),
    "scores are not scaled": (
        "06.2",
        CHUNK.format(scale="", hidden=HIDDEN),
        "7 queries in a context of 7, .* are wrong",
    ),
    "a query does not see itself": (
        "06.2",
        CHUNK.format(scale=" / dim**0.5", hidden="position >= position[-m:, None]"),
        "7 queries in a context of 7, .* are wrong",
    ),
    "keys are repeated": (
        "06.2",
        """
def chunk(q, k, v):
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    scores = torch.einsum("mhd,nhd->hmn", q, k) / q.shape[-1] ** 0.5
    position = torch.arange(len(k))
    scores = scores.masked_fill(position > position[-len(q) :, None], -torch.inf)
    return torch.einsum("hmn,nhd->mhd", scores.softmax(-1), v)
""",
        "numbers was made; the keys have",
    ),
    "no running maximum": (
        "06.3",
        """
def block_by_block(q, blocks):
    total = torch.tensor(0.0)
    out = torch.zeros_like(q)
    for k, v in blocks:
        weights = (k @ q / len(q) ** 0.5).exp()
        total = total + weights.sum()
        out = out + weights @ v
    return out / total
""",
        "a query 200 times as large: the result is off by nan",
    ),
    "no running maximum, in 64 bits": (
        "06.3",
        """
def block_by_block(q, blocks):
    total, out = 0, 0
    for k, v in blocks:
        weights = (k @ q / len(q) ** 0.5).double().exp()
        total = total + weights.sum()
        out = out + weights @ v.double()
    return (out / total).float()
""",
        "a query 2,000 times as large: the result is off by nan",
    ),
    "the maximum begins at zero": (
        "06.3",
        ONLINE.format(**RIGHT | {"start": "0.0"}),
        "scores that are all far below 0: the result is off by nan",
    ),
    "the output is not rescaled": (
        "06.3",
        ONLINE.format(**RIGHT | {"out_factor": "1"}),
        "a context of 13: the result is off by",
    ),
    "the maximum of this block only": (
        "06.3",
        ONLINE.format(**RIGHT | {"new": "scores.max()", "factor": "1"}),
        "a context of 13: the result is off by",
    ),
    "a mean over the blocks": (
        "06.3",
        """
def block_by_block(q, blocks):
    results = [(k @ q / len(q) ** 0.5).softmax(0) @ v for k, v in blocks]
    return sum(results) / len(results)
""",
        "a context of 13: the result is off by",
    ),
    "all blocks are collected": (
        "06.3",
        """
def block_by_block(q, blocks):
    keys, values = (torch.cat(parts) for parts in zip(*blocks))
    return (keys @ q / len(q) ** 0.5).softmax(0) @ values
""",
        "a context of 13: the result is off by nan",
    ),
    "all blocks are copied": (
        "06.3",
        """
def block_by_block(q, blocks):
    copies = [(k.clone(), v.clone()) for k, v in blocks]
    keys, values = (torch.cat(parts) for parts in zip(*copies))
    return (keys @ q / len(q) ** 0.5).softmax(0) @ values
""",
        "numbers were copied: blocks are to be used|a tensor of 1,280 numbers was made",
    ),
}
