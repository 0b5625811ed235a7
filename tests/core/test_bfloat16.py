"""What is promised in bfloat16, where sums of other lengths round differently: with other batches, a log-probability
moves by at most MOST, and the greedy token stays the same where the likeliest is ahead by more than that.

In float32 nothing of this is needed: there the tokens are the same. Run: pytest tests/core/test_bfloat16.py
"""

import os

import pytest

from nanovllm import LLM, SamplingParams

MOST = (
    0.5  # of the natural logarithm; measured: 0.31, and 0.06 where another token was the likeliest
)
PROMPTS = [
    "Once upon a time there was a shy fox named Luna who lived on a green hill.",
    "12 + 30 =",
    "2, 3, 5, 7, 11, 13",
    "Anna 4711\nOtto 0815\nSøren 1234\nMaya 9090\nwhat is the number of Otto?",
    "Tell me a story about a duck.",
    "reverse the words: river stone apple cloud",
]
WAYS = {
    "together": {},
    "in chunks": {"max_num_batched_tokens": 7},
    "with scarce memory": {"num_blocks": 26},
    "vattention": {"attention_backend": "vattention"},
}


def answers(one_by_one: bool = False, **options):
    """Greedy ones, with the two likeliest of each token, and the log-probabilities of the prompt."""
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    llm = LLM(**{"dtype": "bfloat16", "num_blocks": 400, "enable_prefix_caching": False, **options})
    if one_by_one:
        return [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
    return llm.generate(PROMPTS, params, use_tqdm=False)


@pytest.fixture(scope="module")
def alone():
    return answers(one_by_one=True)


def number(logprob) -> float:
    return getattr(logprob, "logprob", logprob)


def compare(output, other, allowed: float) -> None:
    """Token by token, as long as both have drawn the same ones."""
    pairs = list(zip(output.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True))
    (ours,) = output.outputs
    (theirs,) = other.outputs
    for i, (token_id, other_id) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
        pairs.append((ours.logprobs[i], theirs.logprobs[i]))
        if token_id != other_id:
            first, second = sorted(map(number, theirs.logprobs[i].values()), reverse=True)[:2]
            assert first - second <= allowed
            break
    for row, other_row in pairs:
        for token_id in row.keys() & other_row.keys():
            assert abs(number(row[token_id]) - number(other_row[token_id])) <= allowed


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("way", WAYS)
def test_a_log_probability_moves_little_with_the_batch(alone, way):
    if way == "vattention" and not hasattr(os, "memfd_create"):
        pytest.skip("memfd_create is Linux's")
    for output, other in zip(answers(**WAYS[way]), alone, strict=True):
        compare(output, other, MOST)
