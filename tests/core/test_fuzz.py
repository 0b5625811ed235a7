"""Random requests with parameters at the edges of what is allowed: each runs to its end, no step fails, and a neighbor in
the same batch gets its usual answer. Only what cannot fit is refused; wrong values are in test_config.py and test_inputs.py.

Run: pytest tests/core/test_fuzz.py; with --slow four times as many
"""

import random
from collections import Counter

import pytest

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.topics.checks.blocks import check_blocks

TINY = [5e-324, 1e-46, 1e-40, 1e-38]
LONG = ["ab" * 50_000, "a" * 100_000]
EDGES = {  # what is allowed
    "n": [1, 1, 1, 2, 3, 12],
    "temperature": [0, 0.0, -0.0, *TINY, 1e-10, 0.3, 1, 1.0, 2.5, 1e6],
    "top_k": [0, -1, 1, 2, 5, 1535, 1536, 1537, 2**31, 2**63, 10**30, 10**5000],
    "top_p": [*TINY, 1e-10, 0.5, 0.999999999, 1 - 2**-53, 1, 1.0],
    "min_p": [0, *TINY, 1e-10, 0.5, 1 - 2**-53, 1, 1.0],
    "max_tokens": [1, 1, 2, 5, 9, 10**30, 10**5000, None],
    "stop": [None, [], (), "a", " ", "\n", ["the", "e"], ["x"] * 300, *LONG, "\ud800", "😀", "\ufffd"],
    "stop_token_ids": [None, [], (), [0], [1535], {7, 8}, list(range(1536)), [3] * 5000],
    "ignore_eos": [True, False],
    "seed": [None, 0, 1, 2**31, 2**32, 2**63 - 1],
    "logprobs": [None, 0, 1, 20],
    "cache_salt": [None, "0", "a", "😀" * 99],
}  # fmt: skip
BEAM_EDGES = {
    "beam_width": [1, 2, 3, 12],
    "max_tokens": EDGES["max_tokens"][:-1],
    "length_penalty": [-10, -1, 0, 5e-324, 1.0, 10],
    "early_stopping": [True, False, "never"],
    "ignore_eos": EDGES["ignore_eos"],
}
SPECIAL = ["<|im_end|>", "<|endoftext|>" * 3]
PROMPTS = [
    *["a", " ", "\n", "\x00", "what is 12 + 30?", "😀😀", "e\u0301", *SPECIAL, "word " * 12],
    *[[0], [1535], [5] * 15, [5] * 16, [5] * 17, [9, 8] * 16, [7] * 63, (1, 2, 3), list(range(40))],
    [{"role": "user", "content": "list all prime numbers within 20"}],
    [{"role": "x", "content": ""}],
    [{"role": "user", "content": "1 + 1", "name": "a"}, {"role": "assistant", "content": "2"}],
]


def draw(rng: random.Random, edges: dict) -> dict:
    """Some of the parameters, each with an edge."""
    names = rng.sample(sorted(edges), rng.randint(0, len(edges)))
    return {name: rng.choice(edges[name]) for name in names}


def is_greedy(params: SamplingParams) -> bool:
    """Whether one token only can be drawn, if no two are equally likely."""
    if params.temperature > 100:  # all tokens are equally likely in float32, or nearly
        return False
    return (
        params.temperature < 1e-9
        or params.top_k == 1
        or params.top_p < 1e-9
        or params.min_p >= 1 - 2**-53
    )


def copied(params: SamplingParams, **changes) -> SamplingParams:
    return SamplingParams(**vars(params) | changes)


class Fuzz:
    def __init__(self, **kwargs):
        self.llm = LLM(
            max_num_seqs=12, max_model_len=64, block_size=4, max_num_batched_tokens=60, **kwargs
        )
        self.counts, self.done = Counter(), {}
        self.question, self.answer = (
            [{"role": "user", "content": "what is 347 + 285?"}],
            "347 + 285 = 632",
        )

    def round(self, rng: random.Random) -> int:
        """A few requests, and the neighbor among them. Returns how many they were."""
        llm, num_requests, twins = self.llm, rng.randint(1, 12), {}
        neighbor = SamplingParams(temperature=0, max_tokens=20)
        sent, ids, at = {}, [], rng.randrange(num_requests)
        for i in range(num_requests):
            if i == at:
                me = llm.add_request(self.question, neighbor)
            try:
                prompt = rng.choice(PROMPTS)
                is_beams = rng.random() < 0.15
                cls, edges = (BeamSearchParams, BEAM_EDGES) if is_beams else (SamplingParams, EDGES)
                params = cls(**draw(rng, edges))
                ids.append(llm.add_request(prompt, params))
            except ValueError as error:
                assert str(error) and len(str(error)) < 1000, str(error)
                self.counts["refused"] += 1
                continue
            sent[ids[-1]] = params
            if isinstance(params, SamplingParams) and is_greedy(params):
                twins[ids[-1]] = llm.add_request(
                    prompt, copied(params, temperature=0, logprobs=None)
                )
            for _ in range(rng.choice([0, 0, 1, 3])):
                self.step()
        while llm.has_unfinished():
            self.step()
        for request_id in ids:
            output = self.done.pop(request_id)
            assert output.error is None and output.finished
            for o in output.outputs:
                assert o.finish_reason in ("stop", "length") and o.token_ids
                assert all(0 <= token < 1536 for token in o.token_ids)
                assert o.logprobs is None or len(o.logprobs) == len(o.token_ids)
            if request_id in twins:
                twin = self.done.pop(twins[request_id])
                assert [o.token_ids for o in output.outputs] == [
                    o.token_ids for o in twin.outputs
                ], sent[request_id]
                self.counts["greedy"] += 1
        assert self.done.pop(me).outputs[0].text == self.answer and not self.done
        assert llm.stats()["failed_steps"] == 0 and llm.block_manager.num_used_blocks == 0
        self.counts["answered"] += len(ids)
        return num_requests

    def step(self) -> None:
        for output in self.llm.step():
            if output.finished:
                self.done[output.request_id] = output

    def run(self, num_requests: int, seed: int) -> Counter:
        rng, todo = random.Random(seed), num_requests
        while todo > 0:
            todo -= self.round(rng)
        check_blocks(self.llm.block_manager, [])
        return self.counts


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize(
    "options", [dict(num_blocks=400), dict(num_blocks=110, preemption_mode="swap", seed=5)]
)
def test_whatever_is_accepted_runs(options, pytestconfig):
    total = 40 if pytestconfig.getoption("--slow") else 20
    counts = Fuzz(**options).run(total, seed=len(options))
    assert counts["answered"] > 0.6 * total
    assert counts["greedy"] > 0.12 * total
