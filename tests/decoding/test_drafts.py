"""Draft tokens change no output, whatever proposes them: a lookup, or proposers that are always, sometimes or never right.

Run: pytest tests/decoding/test_drafts.py [-k proposed]
"""

import random

import pytest
from checkpoints import new_model, save
from extras import needs
from fake_engine import check_clean, result
from fake_engine import new_llm as new_fake_llm
from fake_model import FakeRunner, Oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenarios import AnyPolicy, play, scenarios, with_beams
from scheduling import new_request, new_scheduler, step

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.config import EMBEDDED_MODEL
from nanovllm.schedule import ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.decoding.drafts import (
    Lookup,
    PromptLookup,
    Proposer,
    SpeculativeConfig,
    allows_drafts,
)
from nanovllm.topics.decoding.groups import share
from nanovllm.topics.drafting.draft_model import DraftModel

GREEDY = SamplingParams(temperature=0, max_tokens=30)


# --- what is proposed ---


def naive(token_ids: list[int], most: int, sizes) -> list[int]:
    """Looks at the whole text each time."""
    for size in sizes:
        if size > len(token_ids):
            continue
        for begin in range(len(token_ids) - size):
            if token_ids[begin : begin + size] == token_ids[-size:]:
                return token_ids[begin + size :][:most]
    return []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 6),
    st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    st.lists(st.integers(1, 40), max_size=5),
)
def test_a_lookup_finds_what_a_search_of_the_whole_text_finds(text, most, ends, stops):
    low, high = ends
    lookup = Lookup(SpeculativeConfig(prompt_lookup_min=low, prompt_lookup_max=high))
    for end in sorted({*stops, len(text)}):
        so_far = text[:end]
        assert lookup.propose(so_far, most) == naive(so_far, most, range(high, low - 1, -1))


def test_a_lookup_looks_at_new_tokens_only():
    class Text(list):
        num_slices = 0

        def __getitem__(self, i):
            Text.num_slices += isinstance(i, slice)
            return super().__getitem__(i)

    lookup = Lookup(SpeculativeConfig())
    text = Text(range(5000))
    for _ in range(5):  # a long prompt takes several steps
        Text.num_slices = 0
        lookup.propose(text, 4)
        assert 500 < Text.num_slices < 3500
    for token_id in range(5000, 5010):
        Text.num_slices = 0
        text.append(token_id)
        lookup.propose(text, 4)
        assert Text.num_slices < 10


def test_an_index_is_made_again_if_tokens_are_gone():
    proposer = PromptLookup(SpeculativeConfig(prompt_lookup_min=1))
    seq = new_request(0, [1, 2, 3, 1]).sequences[0]
    assert proposer.propose(seq, 4) == [2, 3, 1]
    seq.token_ids[1:] = [7, 1]
    assert proposer.propose(seq, 4) == [7, 1]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"method": "eagle"}, "method='eagle' is not allowed: it must be 'ngram' or 'draft_model'"),
        ({"method": "mtp"}, r"'draft_model' \(EAGLE and MTP heads read hidden states: chapter 22\)"),
        ({"method": "draft_model"}, "model=None is not allowed: it must be a draft model with"),
        ({"method": "ngram", "model": "x"}, "model='x' is not allowed: it must be a draft model with"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 is not allowed: it must be an integer from 1 to 64"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True is not allowed"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min=5 is not allowed: it must be at most prompt_lookup_max=4"),
        ({"prompt_lookup_max": 1}, "prompt_lookup_min=2 is not allowed: it must be at most prompt_lookup_max=1"),
        ({"draft": "x"}, "SpeculativeConfig has no field 'draft'"),
        ({5: 1}, "SpeculativeConfig has no field '5'"),
    ],
)  # fmt: skip
def test_wrong_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        LLM(runner=FakeRunner(4), speculative_config=fields)


# --- how many steps it takes ---


class Known(Proposer):
    """Knows the answers of a run before, and is right so often."""

    def __init__(self, outputs, all_params, right: float = 1.0, k: int = 4):
        super().__init__(SpeculativeConfig(num_speculative_tokens=k))
        self.jobs = [
            (output.prompt_token_ids, params, [one.token_ids for one in output.outputs])
            for output, params in zip(outputs, all_params, strict=True)
        ]
        self.right, self.rng = right, random.Random(k)

    def propose(self, seq, most):
        asked = seq.request.prompt_token_ids, seq.request.params
        answer = next(answers[seq.index] for *job, answers in self.jobs if tuple(job) == asked)
        coming = answer[seq.num_output_tokens :][:most] or [7] * most
        return [i if self.rng.random() < self.right else self.rng.randrange(1000) for i in coming]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_accepted_draft_tokens_save_steps(k):
    llm = new_fake_llm()
    params = SamplingParams(seed=1, max_tokens=37, ignore_eos=True)
    (expected,) = llm.generate([[5] * 9], params, use_tqdm=False)
    llm.scheduler.proposer = Known([expected], [params], k=k)
    before = llm.stats()
    (output,) = llm.generate([[5] * 9], params, use_tqdm=False)
    after = llm.stats()
    assert result(output) == result(expected)
    # a step for the prompt, which gives a token; each of the others gives 1 + k
    num_steps = 1 + -(-36 // (1 + k))
    assert after["steps"] - before["steps"] == num_steps
    assert after["output_tokens"] - before["output_tokens"] == 37
    assert after["accepted_draft_tokens"] == 37 - num_steps == after["draft_tokens"]
    check_clean(llm)


# --- draft tokens take nothing from other requests ---


class Zeros(Proposer):
    """Which is all that a model with one token says."""

    def __init__(self, k: int):
        super().__init__(SpeculativeConfig(num_speculative_tokens=k))

    def propose(self, seq, most):
        return [0] * most


def test_draft_tokens_take_what_the_budget_has_left():
    """Two sequences decode, and a prompt comes: it gets its tokens first."""
    scheduler, runner = new_scheduler(tokens=12), FakeRunner(4, vocab_size=1)
    for i in range(2):
        scheduler.add(new_request(i, 3, max_tokens=40))
    step(scheduler, runner)
    scheduler.proposer = Zeros(6)
    scheduler.add(new_request(2, 8, max_tokens=4))
    assert step(scheduler, runner) == [("0", 1 + 2), ("1", 1), ("2", 8)]
    assert [request.num_output_tokens for request in scheduler.running] == [4, 2, 1]


def test_draft_tokens_take_free_blocks_only_and_give_them_back():
    scheduler, runner = new_scheduler(num_blocks=5, tokens=64), FakeRunner(4, vocab_size=3)
    scheduler.proposer = Zeros(20)
    scheduler.add(new_request(0, 7, max_tokens=7))
    scheduler.add(new_request(1, 7, max_tokens=7))
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        assert schedule.num_used_blocks == scheduler.block_manager.num_used_blocks
        scheduler.update(schedule, *runner.run(schedule))
        sequences = [seq for r in scheduler.unfinished() for seq in r.unfinished]
        check_blocks(scheduler.block_manager, sequences)
        assert all(len(seq.block_table) <= -(-len(seq) // 4) for seq in sequences)
        for row, last in schedule.sampled.items():  # those that were refused are gone
            text = getattr(last, "seq", row).token_ids
            assert text[: len(row)] == row.token_ids
    stats = scheduler.proposer.stats
    assert stats["draft_tokens"] > 10 and stats["accepted_draft_tokens"] < stats["draft_tokens"] / 2


def test_blocks_that_samples_will_need_at_their_fork_are_left_alone():
    class SlowPrompts(Scheduler):
        def step_budget(self):
            return self.max_num_batched_tokens, 3

    scheduler = new_scheduler(num_blocks=12, tokens=64, cls=SlowPrompts)
    scheduler.proposer, runner = Zeros(30), FakeRunner(4, vocab_size=3)
    samples = new_request(1, 9, n=3)
    for request in (new_request(0, 3, max_tokens=40), samples):
        scheduler.add(request)
    for _ in range(3):
        schedule = scheduler.schedule()
        assert not samples.has_forked and scheduler.block_manager.num_free_blocks >= 2
        scheduler.update(schedule, *runner.run(schedule))


def test_a_chunk_gets_no_drafts_if_more_of_the_prompt_is_missing():
    class SlowPrompts(Scheduler):
        def step_budget(self):
            return self.max_num_batched_tokens, 3

    scheduler, runner = new_scheduler(tokens=20, cls=SlowPrompts), FakeRunner(4, vocab_size=3)
    scheduler.proposer = Zeros(6)
    scheduler.add(new_request(0, 5))
    assert step(scheduler, runner) == [("0", 3)]


def test_beams_and_scored_prompts_get_no_drafts():
    plain, forks, beams = new_request(0, 3), new_request(1, 3, n=2), with_beams(new_request(2, 3))
    scored = Request("3", None, [1, 2, 3], SamplingParams(prompt_logprobs=0))
    for request in (plain, beams, scored):
        request.has_forked = True
    assert [*map(allows_drafts, (plain, forks, beams, scored))] == [True, False, False, False]


def test_a_policy_says_how_many():
    class OnlyTheFirst(Scheduler):
        def num_draft_tokens(self, request):
            return 3 if request.arrival == 0 else 0

    scheduler, runner = new_scheduler(cls=OnlyTheFirst, tokens=40), FakeRunner(4, vocab_size=1)
    scheduler.proposer = Zeros(9)
    for i in range(2):
        scheduler.add(new_request(i, 3, max_tokens=9))
    assert step(scheduler, runner) == [("0", 3 + 3), ("1", 3)]
    assert step(scheduler, runner) == [("0", 4), ("1", 1)]


@pytest.mark.parametrize("wrong", [None, -1, 2.0])
def test_a_policy_that_says_nonsense_is_told_so(wrong):
    class Wrong(Scheduler):
        def num_draft_tokens(self, request):
            return wrong

    llm = new_fake_llm(scheduler_cls=Wrong, speculative_config={})
    message = rf"Wrong.num_draft_tokens\(\): it returned {wrong!r}, and not a number of tokens"
    with pytest.raises(ScheduleError, match=message):
        llm.generate([[5] * 9], GREEDY, use_tqdm=False)
    check_clean(llm)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios, st.integers(0, 999))
def test_whatever_happens_every_request_gets_its_own_tokens(scenario, seed):
    play(*scenario, proposer=Oracle(random.Random(seed), 3))


class FakeDraftModel(FakeRunner):
    """Is right so often. Reads its cache: with `is_strict`, each token that the engine counts as computed must be there."""

    def __init__(self, rng: random.Random, block_size: int, right: float, is_strict: bool):
        super().__init__(block_size)
        self.rng, self.right, self.is_strict = rng, right, is_strict

    def check(self, seq):
        if self.is_strict:
            super().check(seq)

    def run(self, schedule):
        tokens, logprobs = super().run(schedule)
        return [
            t if self.rng.random() < self.right else self.rng.randrange(3) for t in tokens
        ], logprobs


@pytest.mark.parametrize("cls", [Scheduler, AnyPolicy])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios, st.sampled_from([1.0, 0.8, 0.0]), st.integers(1, 6), st.integers(0, 999))
def test_the_cache_of_a_draft_model_follows_whatever_happens(cls, scenario, right, k, seed):
    """With prefix caching, a block that was filled by a draft may lack its last token."""
    proposer = DraftModel(SpeculativeConfig(model="x", num_speculative_tokens=k))
    _, block_size, _, _, _, is_caching, *_ = scenario
    proposer.runner = FakeDraftModel(random.Random(seed), block_size, right, not is_caching)
    play(*scenario, cls=cls, proposer=proposer)
    assert proposer.runner is not None  # it has not failed


# --- the same tokens, on a real model ---

PROMPTS = [
    "repeat: apple river stone cloud garden",
    "sort 7, 3, 9, 1, 5",
    [5, 6, 7] * 12,
    "Once upon a time there was a fox. Once upon a time",
]
CHOICE = [f"{word} river {word}" for word in ("stone", "cloud", "candle")]
KINDS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=24, n=3, top_p=0.9, logprobs=2),
    SamplingParams(seed=2, max_tokens=24, top_k=40, presence_penalty=0.5, stop=["e "]),
    SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=1, stop=["r", "s"]),
    SamplingParams(seed=3, max_tokens=24, logit_bias={11: 5.0}, min_tokens=9, min_p=0.02),
    SamplingParams(temperature=0, max_tokens=30, structured_outputs={"regex": "([a-f]{3} )*z"}),
    SamplingParams(seed=4, max_tokens=30, n=2, structured_outputs={"choice": CHOICE}),
    SamplingParams(seed=5, max_tokens=30, ignore_eos=True, bad_words=["the", "a", "river"]),
    SamplingParams(seed=6, max_tokens=20, allowed_token_ids=[*range(40, 60)], temperature=3.0),
    BeamSearchParams(beam_width=3, max_tokens=8),
]
JOBS = [(prompt, params) for params in KINDS for prompt in PROMPTS]


def answers(llm: LLM) -> list:
    prompts, params = zip(*JOBS)
    return llm.generate(list(prompts), list(params), use_tqdm=False)


def told(outputs) -> list:
    """All that a user sees; log-probabilities nearly, as their order of summing differs."""
    told = []
    for one in (one for output in outputs for one in output.outputs):
        told.append((one.token_ids, one.text, one.finish_reason, one.stop_reason))
        for row in one.logprobs or []:
            told += [(i, pytest.approx(value, abs=1e-3)) for i, value in row.items()]
    return told


def new_llm(**options) -> LLM:
    return LLM(**dict(dtype="float32", num_blocks=1000, block_size=4, device="cpu") | options)


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """A draft model with random weights, of another family."""
    model = new_model("llama", vocab_size=LLM(num_blocks=1).inputs.vocab_size)
    return save(model, tmp_path_factory.mktemp("noise"))


@pytest.fixture(scope="module")
def expected():
    needs("llguidance")
    return answers(new_llm())


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "torch"},
        {"num_blocks": 90, "max_num_batched_tokens": 40, "max_num_seqs": 16},
        {"num_blocks": 90, "preemption_mode": "swap", "swap_gib": 0.01, "max_num_seqs": 16},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 300},
        {"block_size": 1, "num_blocks": 4000},
    ],
    ids=str,
)
@pytest.mark.parametrize("right", [None, 1.0, 0.7, 0.0])
@pytest.mark.slow(but_every=12)
def test_the_same_tokens_whatever_is_proposed(expected, options, right):
    llm = new_llm(speculative_config={"prompt_lookup_min": 1}, **options)
    if right is not None:
        llm.scheduler.proposer = Known(expected, [params for _, params in JOBS], right, k=5)
    outputs = answers(llm)
    assert told(outputs) == told(expected)
    stats = llm.stats()
    assert stats["draft_tokens"] > 100 and (stats["accepted_draft_tokens"] > 100 or right == 0)
    assert stats["output_tokens"] >= sum(len(o.token_ids) for out in outputs for o in out.outputs)
    if llm.block_manager.num_free_blocks == 90 and right in (None, 0.0):
        assert llm.scheduler.num_preemptions > 0
    check_blocks(llm.block_manager, [])


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 40},
        {
            "preemption_mode": "swap",
            "swap_gib": 0.01,
            "scheduler_cls": type("Mine", (Scheduler,), {}),
        },
    ],
    ids=["chunks", "swap"],
)
@pytest.mark.slow(but_every=2)
def test_the_model_is_its_own_best_draft(expected, options, backend):
    """Whatever happens to the blocks, it rejects only what lies behind an end."""
    fields = {"model": EMBEDDED_MODEL, "num_speculative_tokens": 3}
    options = options | {"attention_backend": backend, "num_blocks": 60, "max_num_seqs": 16}
    llm = new_llm(speculative_config=fields, **options)
    outputs = [*answers(llm), *answers(llm)]
    assert told(outputs) == told(expected) * 2
    stats = llm.stats()
    num_stopped = sum(one.finish_reason == "stop" for out in outputs for one in out.outputs)
    assert stats["draft_tokens"] - stats["accepted_draft_tokens"] <= 3 * num_stopped
    assert stats["preemptions"] > 0 and stats["prefix_cache_hit_tokens"] > 0
    check_blocks(llm.block_manager, [])


def test_a_poor_draft_model_that_fails_changes_no_token(expected, noise, caplog):
    llm = new_llm(speculative_config={"model": noise})
    launch, left = llm.runner.draft.launch, iter(range(50))

    def fails_at_last(schedule):
        assert next(left, None) is not None, "broken"
        return launch(schedule)

    llm.runner.draft.launch = fails_at_last
    assert told(answers(llm)) == told(expected)
    stats = llm.stats()
    assert stats["accepted_draft_tokens"] < stats["draft_tokens"] / 10
    assert caplog.text.count("the draft model has failed: no more draft tokens") == 1
    assert (
        llm.generate([[5] * 9], GREEDY, use_tqdm=False) and llm.stats()["drafts"] == stats["drafts"]
    )
    check_blocks(llm.block_manager, [])


def test_the_cache_of_a_draft_model_is_counted(noise):
    options = dict(num_blocks=None, kv_cache_gib=2**-8, swap_gib=2**-9, preemption_mode="swap")
    llm = new_llm(speculative_config={"model": noise}, **options)
    runner, draft = llm.runner, llm.runner.draft
    tensors = [one.kv_cache.tensor for one in (runner, draft)]
    assert {tensor.shape[2] for tensor in tensors} == {runner.num_blocks}
    block_bytes = sum(tensor.nbytes for tensor in tensors) // runner.num_blocks
    assert runner.num_blocks == 2**22 // block_bytes
    hosts = [len(one.caches.on_host.blocks) for one in (runner, draft)]
    assert hosts == [2**21 // block_bytes] * 2
    llm.close()
    assert not hasattr(draft, "caches") and not hasattr(draft, "model")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not allowed: it must be 1 with a draft model"),
        ({"attention_backend": "vattention"}, "attention_backend='vattention' is not allowed: it must be another one"),
        ({"model": "small"}, r"with the vocabulary of .*tiny_qwen3, 1536 tokens, not 160"),
        ({"model": "hybrid"}, "it must be a model whose layers have no states"),
        ({"model": "/nowhere"}, "model='/nowhere'"),
    ],
)  # fmt: skip
def test_what_a_draft_model_does_not_go_with(tmp_path, options, message):
    draft = options.pop("model", EMBEDDED_MODEL)
    if draft in ("small", "hybrid"):
        draft = save(new_model("qwen3" if draft == "small" else "qwen3_5_text"), tmp_path)
    with pytest.raises(ValueError, match=message):
        new_llm(speculative_config={"model": draft}, **options)


def test_a_sample_that_is_the_beginning_of_another_keeps_its_last_token():
    """A preempted request may have such samples, if only one of them had draft tokens."""
    request = new_request(0, [1, 2, 3, 4, 5], max_tokens=9, n=2)
    request.sequences[1].token_ids += [6, 7]
    share(request, BlockManager(9, 4))
    assert request.num_shared_tokens == 4
    request.sequences[0].token_ids += [6, 8]
    share(request, BlockManager(9, 4))
    assert request.num_shared_tokens == 6  # tokens that were sampled alike are shared, too


@pytest.mark.parametrize("options", [{}, {"speculative_config": {"num_speculative_tokens": 16}}])
def test_accepted_draft_tokens_are_found_by_the_next_turn(options):
    llm = new_llm(attention_backend="torch", **options)
    params = SamplingParams(temperature=0, max_tokens=29, ignore_eos=True)
    (first,) = llm.generate([[5, 6, 7] * 8], params, use_tqdm=False)
    text = first.prompt_token_ids + first.outputs[0].token_ids
    (second,) = llm.generate([[*text, 9]], params, use_tqdm=False)
    assert second.num_cached_tokens == 52
