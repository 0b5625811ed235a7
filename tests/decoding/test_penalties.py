"""Penalties, biases, the least number of tokens, and log-probabilities of prompts: against processors of transformers,
in every schedule, both backends and through recorded steps.

Run: pytest tests/decoding/test_penalties.py [-k prompt]
"""

import math
import random
from collections import Counter
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from checkpoints import new_model, save
from extras import needs
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from nanovllm import LLM, SamplingParams
from nanovllm.backends import torch_ops
from nanovllm.sequence import Request
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.decoding.penalties import adjusted_logits
from nanovllm.topics.decoding.rules import rules_of

STOP = 98
PROMPTS = [[5, 9, 5, 30], [5, 9, 5, 30, 77, 4, 8, 5], [11], list(range(20, 33))]
MAX_TOKENS = 16
OPTIONS = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -0.5, "presence_penalty": -2},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.7, "presence_penalty": 1.0},
    {"logit_bias": {3: 5.5, 150: -100, 61: 2}},
    {"min_tokens": 6},
    {"min_tokens": 4, "logit_bias": {STOP: 100}},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "logit_bias": {5: 4.0}, "min_tokens": 16},
]


@pytest.fixture(scope="module")
def model():
    return new_model("qwen3")


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    return save(model, tmp_path_factory.mktemp("penalties"))


def counted(options: dict, prompt: list[int], ids, scores):
    """As OpenAI defines both penalties: times the number of occurrences, and once for each token that occurred."""
    scores = scores.clone()
    for token_id, count in Counter(ids[0, len(prompt) :].tolist()).items():
        scores[0, token_id] -= count * options.get("frequency_penalty", 0)
        scores[0, token_id] -= options.get("presence_penalty", 0)
    return scores


def steps_of(prompt: list[int], options: dict) -> LogitsProcessorList:
    """What transformers does to the logits."""
    steps = LogitsProcessorList()
    if "min_tokens" in options:
        shortest = options["min_tokens"]
        steps.append(MinNewTokensLengthLogitsProcessor(len(prompt), shortest, [STOP]))
    if "logit_bias" in options:
        bias = [[[token_id], float(value)] for token_id, value in options["logit_bias"].items()]
        steps.append(SequenceBiasLogitsProcessor(bias))
    if "repetition_penalty" in options:
        steps.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    steps.append(partial(counted, options, prompt))
    return steps


@torch.inference_mode()
def expected_tokens(model, prompt: list[int]) -> list[list[int]]:
    """With each of the options, the likeliest token by transformers' model and processors, again and again."""
    all_steps = [steps_of(prompt, options) for options in OPTIONS]
    ids = torch.tensor([prompt] * len(OPTIONS))
    for _ in range(MAX_TOKENS):
        logits = model(ids).logits[:, -1:].unbind()
        scores = [steps(ids[[i]], row) for i, (steps, row) in enumerate(zip(all_steps, logits))]
        ids = torch.cat([ids, torch.cat(scores).argmax(-1, keepdim=True)], 1)
    answers = ids[:, len(prompt) :].tolist()
    return [answer[: [*answer, STOP].index(STOP) + 1] for answer in answers]


@pytest.fixture
def interpret_little(monkeypatch):
    """Layers that do not matter here do without Triton where it is interpreted."""
    if find_spec("triton") is None or torch.cuda.is_available():
        return
    for name in ("add_and_norm", "silu_and_mul"):
        monkeypatch.setattr(f"nanovllm.backends.triton_ops.{name}", getattr(torch_ops, name))


@pytest.fixture(scope="module")
def requests(model):
    """(prompt, parameters, expected tokens), of all prompts with all options."""
    made = []
    for prompt in PROMPTS:
        for options, expected in zip(OPTIONS, expected_tokens(model, prompt)):
            params = SamplingParams(
                temperature=0, max_tokens=MAX_TOKENS, stop_token_ids=[STOP], **options
            )
            made.append((prompt, params, expected))
    return made


def check(llm: LLM, requests) -> None:
    prompts, params, expected = zip(*requests)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == list(expected)
    check_blocks(llm.block_manager, [])
    assert llm.block_manager.num_used_blocks == 0


def test_the_options_matter(requests):
    """Otherwise the other tests would show nothing: each option changes some prompt's tokens."""
    plain = [tokens for _, _, tokens in requests[:: len(OPTIONS)]]
    for i in range(1, len(OPTIONS)):
        assert [tokens for _, _, tokens in requests[i :: len(OPTIONS)]] != plain, OPTIONS[i]
    assert any(tokens[-1] == STOP for _, _, tokens in requests)


SCHEDULES = [
    ("torch", tokens, num_blocks, mode)
    for tokens in (37, 20, 2048)
    for num_blocks, mode in ((24, "recompute"), (24, "swap"), (500, "recompute"))
]


@pytest.mark.slow(but_every=5)
@pytest.mark.parametrize(
    "backend, tokens, num_blocks, mode", [*SCHEDULES, ("triton", 37, 24, "swap")]
)
@pytest.mark.usefixtures("interpret_little")
def test_tokens_are_those_of_transformers(path, requests, tokens, num_blocks, mode, backend):
    """A token may be anywhere in the batch, computed in chunks, preempted and computed again."""
    if backend == "triton":
        needs("triton")
    llm = LLM(
        path,
        dtype="float32",
        block_size=4,
        num_blocks=num_blocks,
        preemption_mode=mode,
        swap_gib=0.001,
        max_num_seqs=20,
        max_num_batched_tokens=tokens,
        attention_backend=backend,
    )
    check(llm, requests if backend == "torch" else requests[3::17])
    if num_blocks == 24 and backend == "torch":
        assert llm.scheduler.num_preemptions > 0


def in_words(logits, seq):
    """The definition, one token after the other."""
    row = logits.double().tolist()
    params = seq.request.params
    counts = Counter(seq.output_token_ids)
    for token_id, bias in seq.request.rules.biases.items():
        row[token_id] += bias
    if seq.num_output_tokens < params.min_tokens:
        row[STOP] = -math.inf
    for token_id in {*seq.token_ids}:
        factor = params.repetition_penalty
        row[token_id] *= 1 / factor if row[token_id] > 0 else factor
        row[token_id] -= counts[token_id] * params.frequency_penalty
        row[token_id] -= params.presence_penalty if counts[token_id] else 0.0
    return row


def new_request(prompt: list[int], params: SamplingParams) -> Request:
    request = Request("", None, prompt, params)
    request.rules = rules_of(request, None)
    return request


def test_counts_follow_their_sequences():
    """They grow with a sequence, which may lose tokens again, in the middle of a count, too."""
    rng = random.Random(5)
    seqs = []
    for options in OPTIONS:
        params = SamplingParams(n=2, stop_token_ids=[STOP], **options)
        prompt = [rng.randrange(160) for _ in range(rng.randint(1, 60))]
        seqs += new_request(prompt, params).sequences
    for step in range(60):
        batch = rng.sample(seqs, 9)
        logits = torch.randn(9, 160, generator=torch.Generator().manual_seed(step))
        expected = [in_words(row, seq) for row, seq in zip(logits, batch)]
        found = adjusted_logits(logits, batch)
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)
        for seq in batch:
            seq.token_ids.append(rng.choice([7, 30, rng.randrange(160)]))
        if step % 5 == 0:
            lost = batch[0]
            counts = lost.request.rules and lost.request.rules.counts.get(lost.index)
            if counts:
                counts.pairs[1] += 1  # an interrupted step has counted too much
            lost.request.rewind()


def test_log_probabilities_are_those_before_penalties(path, model):
    llm = LLM(path, dtype="float32", num_blocks=100, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=0, logit_bias={4: 100})
    (output,) = llm.generate([[8, 3]], params, use_tqdm=False)
    (answer,) = output.outputs
    assert answer.token_ids == [4] * 5
    with torch.inference_mode():
        scores = model(torch.tensor([[8, 3, *answer.token_ids]])).logits.log_softmax(-1)[0]
    expected = [scores[1 + i, 4].item() for i in range(5)]
    assert [row[4] for row in answer.logprobs] == pytest.approx(expected, abs=1e-3)
    assert answer.cumulative_logprob == pytest.approx(sum(expected), abs=1e-3)


# --- log-probabilities of prompts ---


@torch.inference_mode()
def expected_scores(model, prompt: list[int]) -> list[dict[int, float] | None]:
    scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    rows: list[dict[int, float] | None] = [None]
    for i, token_id in enumerate(prompt[1:]):
        likeliest = scores[i].topk(3).indices.tolist()
        rows.append({j: scores[i, j].item() for j in [token_id, *likeliest]})
    return rows


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize(
    "backend, recorded, tokens, num_blocks",
    [
        ("torch", False, 8, 14),
        ("triton", False, 9, 500),
        ("torch", False, 9, 500),
        ("triton", True, 8, 14),
        ("torch", False, 2048, 500),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")
@pytest.mark.usefixtures("interpret_little")
def test_prompts_are_scored(path, model, monkeypatch, backend, recorded, tokens, num_blocks):
    """Whole, in chunks of any length, beside others, with a cached prefix, and preempted in the middle."""
    monkeypatch.setattr("nanovllm.backends.cuda_graphs.DECODES", [8])
    if backend == "triton":
        needs("triton")
    monkeypatch.setattr("nanovllm.topics.decoding.prompt_logprobs.ROWS_AT_A_TIME", 3)
    llm = LLM(
        path,
        dtype="float32",
        block_size=4,
        num_blocks=num_blocks,
        max_num_seqs=8,
        enforce_eager=not recorded,
        max_num_batched_tokens=tokens,
        attention_backend=backend,
    )
    max_tokens = 8 if backend == "torch" else 2  # Triton's interpreter is slow
    plain = SamplingParams(temperature=0, max_tokens=max_tokens)
    wanted = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=3)
    few = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    several = SamplingParams(n=3, seed=1, max_tokens=3, prompt_logprobs=3, logprobs=1)
    params = [plain, several, few, wanted]
    llm.generate(PROMPTS, plain, use_tqdm=False)  # now their blocks can be found
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    expected = [expected_scores(model, prompt) for prompt in PROMPTS]
    assert outputs[0].prompt_logprobs is None
    assert outputs[2].prompt_logprobs == [None]
    for i in (1, 3):
        assert outputs[i].prompt_logprobs[0] is None
        assert len(outputs[i].prompt_logprobs) == len(PROMPTS[i])
        for found, row in zip(outputs[i].prompt_logprobs[1:], expected[i][1:]):
            assert found == pytest.approx(row, abs=1e-3)
            assert next(iter(found)) == next(iter(row))
    (again,) = llm.generate([PROMPTS[3]], few, use_tqdm=False)
    firsts = [next(iter(row.items())) for row in expected[3][1:]]
    assert [next(iter(row.items())) for row in again.prompt_logprobs[1:]] == [
        (token_id, pytest.approx(score, abs=1e-3)) for token_id, score in firsts
    ]
    check_blocks(llm.block_manager, [])
