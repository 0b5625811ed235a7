"""Are log-probabilities the same whatever else is computed? The same answers in groups of other sizes.

    python -m measure.any_batch --json tutorials/results/cpu_any_batch.json

Each backend answers 48 requests, drawn at temperature 1, all together, then in groups. The prompts
are computed in one piece and never found in the prefix cache: what differs is the company. An
answer counts as equal if each of its log-probabilities is, to the last bit.

Then 400 requests of 100 tokens, alone and 64 at a time, with prompts in chunks: how many tokens are
drawn up to the first that is another one?
"""

import random

import torch

from nanovllm import LLM, SamplingParams
from tutorials.arguments import experiment
from tutorials.machine import device_name, environment, installed
from tutorials.report import aligned, write_json

REQUESTS = 48
SIZES = (1, 2, 3, 7, 16)
BACKENDS = ("numba", "torch")


def answers(llm: LLM, size: int) -> list[tuple]:
    """Token ids and log-probabilities of each request, in groups of this size."""
    rng = random.Random(1)
    prompts = [[rng.randrange(1500) for _ in range(rng.randint(2, 100))] for _ in range(REQUESTS)]
    params = [
        SamplingParams(seed=i, max_tokens=rng.randint(4, 60), logprobs=1, ignore_eos=True)
        for i in range(REQUESTS)
    ]
    found = []
    for begin in range(0, REQUESTS, size):
        group = slice(begin, begin + size)
        for output in llm.generate(prompts[group], params[group], use_tqdm=False):
            (one,) = output.outputs
            found.append((one.token_ids, one.logprobs))
    return found


def compare(backend: str) -> dict[str, dict]:
    """For each size of a group: how many answers are equal to those of all together."""
    llm = LLM(
        dtype="float32",
        attention_backend=backend,
        enable_prefix_caching=False,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=8192,
    )
    together = answers(llm, REQUESTS)
    rows = {}
    for size in SIZES:
        pairs = list(zip(answers(llm, size), together))
        rows[str(size)] = {
            "same_tokens": sum(one[0] == other[0] for one, other in pairs),
            "same_bits": sum(one == other for one, other in pairs),
        }
    return rows


def compare_draws(backend: str, count: int = 400) -> dict[str, int]:
    rng = random.Random(0)
    prompts = [[rng.randrange(300, 1500) for _ in range(rng.randint(4, 90))] for _ in range(count)]
    params = [SamplingParams(seed=i, max_tokens=100, ignore_eos=True) for i in range(count)]
    found = []
    for num_seqs, num_tokens in ((1, 8192), (64, 100)):
        llm = LLM(
            dtype="float32",
            attention_backend=backend,
            enable_prefix_caching=False,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_tokens,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        llm.close()
    num_drawn = num_others = 0
    for one, other in zip(*found):
        is_other = [a != b for a, b in zip(one, other)]
        num_drawn += [*is_other, True].index(True)
        num_others += any(is_other)
    return {"drawn": num_drawn, "others": num_others}


def main() -> None:
    args = experiment(__doc__).parse_args()
    report = environment() | {
        "device": device_name(torch.device("cpu")),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {name: installed(name) for name in ("torch", "numba")},
        "requests": REQUESTS,
        "backends": {backend: compare(backend) for backend in BACKENDS},
        "draws": {backend: compare_draws(backend) for backend in BACKENDS},
    }
    table = [
        ["groups of", *(f"{name}: {what}" for name in BACKENDS for what in ("tokens", "bits"))]
    ]
    for size in map(str, SIZES):
        rows = [report["backends"][backend][size] for backend in BACKENDS]
        counts = [str(row[key]) for row in rows for key in ("same_tokens", "same_bits")]
        table.append([size, *counts])
    print(aligned(table))
    for name, counts in report["draws"].items():
        print(f"{name}: {counts['others']} of {counts['drawn']:,} drawn tokens are another one")
    write_json(report, args.json)


if __name__ == "__main__":
    main()
