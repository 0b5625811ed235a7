"""One hash over the answers of 72 settings: what a change of the house must leave as it is.

Run: python tests/tools/token_hash.py [torch | numba], before and after
With a number behind it, the engine makes so many guesses for a sequence: the hash must be the same.
"""

import hashlib
import json
import sys
from itertools import product

from nanovllm import LLM, BeamSearchParams, SamplingParams

PROMPTS = [
    *("What is 17 + 25?", "Tell me a story about a fox.", "Is 91 a prime number?"),
    *([5, 6, 7] * 20, [5, 6, 7] * 20 + [9], [8] * 3),
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(seed=1, max_tokens=20, n=3, top_p=0.9, logprobs=2),
    SamplingParams(seed=2, max_tokens=20, top_k=40, presence_penalty=0.5, stop=["e "]),
    SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.2, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, min_tokens=4),
    BeamSearchParams(beam_width=3, max_tokens=8),
]


GUESSES = {"num_speculative_tokens": int(sys.argv[2])} if len(sys.argv) > 2 else None


def answers(block_size: int, tokens: int, scarce: bool, mode: str, cached: bool) -> list:
    """Texts, token ids and reasons. Log-probabilities to three digits: their order of summing may differ."""
    llm = LLM(
        device="cpu",
        dtype="float32",
        attention_backend=sys.argv[1] if len(sys.argv) > 1 else "torch",
        block_size=block_size,
        max_num_batched_tokens=tokens,
        max_num_seqs=min(tokens, 12),
        max_model_len=256,
        num_blocks=(120 if scarce else 1200) * 4 // block_size,
        preemption_mode=mode,
        enable_prefix_caching=cached,
        speculative_config=GUESSES,
    )
    found = []
    for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False):
        for one in output.outputs:
            found.append([one.text, one.token_ids, one.finish_reason, str(one.stop_reason)])
            for likeliest in one.logprobs or []:
                found.append([[i, round(value, 3)] for i, value in sorted(likeliest.items())])
    return found


def main() -> None:
    digest = hashlib.sha256()
    for setting in product(
        (4, 8, 16), (12, 64, 2048), (True, False), ("recompute", "swap"), (True, False)
    ):
        digest.update(json.dumps(answers(*setting)).encode())
    print(digest.hexdigest()[:16])


if __name__ == "__main__":
    main()
