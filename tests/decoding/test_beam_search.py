"""Beam search against transformers' generate(num_beams=...), and what it does to blocks.

Run: pytest tests/decoding/test_beam_search.py [-k transformers]
"""

import random

import pytest
import torch
from checkpoints import new_model, save

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.sequence import Request
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.decoding.beam_search import Beam, BeamSearch

EOS = [7, 11]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}
    for family in ("qwen2", "qwen3"):
        model = new_model(family, eos_token_id=EOS)
        model.generation_config.eos_token_id = EOS
        made[family] = model, save(model, tmp_path_factory.mktemp(family))
    return made


def prompts(count=4):
    rng = random.Random(3)
    return [
        [rng.randrange(160) for _ in range(rng.choice([1, 3, 4, 5, 9, 16, 21]))]
        for _ in range(count)
    ]


@torch.inference_mode()
def transformers_beams(model, prompt, width, max_tokens, **options):
    """[(tokens, score)], best first; padding is cut off."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, do_sample=False,
        max_new_tokens=max_tokens, return_dict_in_generate=True, output_scores=True, pad_token_id=0, **options,
    )  # fmt: skip
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    tokens = out.sequences[:, len(prompt) :].tolist()
    return [
        (row[:n], score) for row, n, score in zip(tokens, lengths, out.sequences_scores.tolist())
    ]


def check(output, expected, length_penalty=1.0):
    assert [o.token_ids for o in output.outputs] == [tokens for tokens, _ in expected]
    for o, (tokens, score) in zip(output.outputs, expected):
        assert o.cumulative_logprob / len(tokens) ** length_penalty == pytest.approx(
            score, rel=1e-5, abs=1e-4
        )
        assert o.finish_reason == ("stop" if tokens[-1] in EOS else "length")


@pytest.mark.slow(but_every=5)
@pytest.mark.parametrize("width", [1, 2, 4, 6])
@pytest.mark.parametrize(
    "length_penalty, early_stopping",
    [(1.0, False), (0.0, "never"), (2.0, True), (-1.0, False), (1.5, "never")],
)
def test_the_same_beams_as_transformers(models, width, length_penalty, early_stopping):
    model, path = models["qwen2" if length_penalty > 1 else "qwen3"]
    llm = LLM(path, dtype="float32", block_size=4, num_blocks=300)
    options = dict(length_penalty=length_penalty, early_stopping=early_stopping)
    outputs = llm.beam_search(
        prompts(), BeamSearchParams(beam_width=width, max_tokens=14, **options), use_tqdm=False
    )
    for prompt, output in zip(prompts(), outputs):
        if width > 1:
            check(output, transformers_beams(model, prompt, width, 14, **options), length_penalty)
        assert len(output.outputs) == width
    check_blocks(llm.block_manager, [])
    assert llm.stats()["kv_blocks_used"] == 0


@pytest.mark.parametrize("early_stopping, ends", [(True, True), (False, True), ("never", False)])
def test_when_a_search_ends(early_stopping, ends):
    params = BeamSearchParams(beam_width=2, early_stopping=early_stopping)
    search = BeamSearch(params, frozenset([9]), max_output_tokens=4)
    start = Request(None, None, [1, 2], params.sampling_params()).sequences[0]
    running = search.advance(
        [Beam(start, t, p) for t, p in [(9, -1.0), (3, -2.0), (4, -2.5), (5, -6.0)]]
    )
    assert [beam.token_id for beam in running] == [3, 4] and len(search.results) == 1
    child = Request(None, None, [1, 2], params.sampling_params()).sequences[0]
    child.token_ids += [3]
    running = search.advance(
        [Beam(child, t, p) for t, p in [(4, -5.0), (9, -5.5), (5, -5.6), (6, -7.0)]]
    )
    assert [beam.score for beam in search.results] == [-1.0, -2.75]
    assert (not running) == (early_stopping is True)
    if running:  # -9 / 3 tokens is worse than -2.75, but -9 / 4 tokens would not be
        child.token_ids += [4]
        running = search.advance(
            [Beam(child, t, p) for t, p in [(5, -9.0), (6, -9.1), (7, -9.2), (8, -9.3)]]
        )
        assert (not running) == ends


def test_which_candidates_count():
    """The first ones, the likeliest first; results are the best, even if they came late."""
    params = BeamSearchParams(beam_width=1, early_stopping="never", length_penalty=0.0)
    search = BeamSearch(params, frozenset([9]), max_output_tokens=4)
    start = Request(None, None, [1, 2], params.sampling_params()).sequences[0]
    ended = [Beam(start, 9, -2.0 - i) for i in range(search.num_candidates - 1)]
    (running,) = search.advance([*ended, Beam(start, 3, -1.0)])
    assert running.token_id == 3 and not search.results  # one that ends must be the likeliest
    search.advance([Beam(start, 9, -2.0), Beam(start, 3, -2.5)])
    search.advance([Beam(start, 9, -0.5), Beam(start, 3, -2.5)])
    assert [beam.score for beam in search.results] == [-0.5]
    long = BeamSearchParams(beam_width=1, early_stopping="never", length_penalty=2.0)
    search = BeamSearch(long, frozenset([9]), max_output_tokens=4)
    assert search.advance([*ended, Beam(start, 9, -8.0), Beam(start, 3, -9.0)]) == []


@pytest.mark.parametrize(
    "penalty, logprob, is_decided", [(-1, -0.9, False), (1, -4.0, True), (1, -3.0, False)]
)
def test_a_search_is_decided_if_nothing_is_expected_to_be_better(penalty, logprob, is_decided):
    """A result of -2 for one token; the likeliest beam has two. The length with the best score is the present one, if long
    outputs are punished. An equal score is not better."""
    early_stopping = False if penalty > 0 else "never"
    params = BeamSearchParams(beam_width=1, early_stopping=early_stopping, length_penalty=penalty)
    search = BeamSearch(params, frozenset([9]), max_output_tokens=4)
    start = Request(None, None, [1, 2], params.sampling_params()).sequences[0]
    search.advance([Beam(start, 9, -2.0), Beam(start, 3, -2.5)])
    child = Request(None, None, [1, 2], params.sampling_params()).sequences[0]
    child.token_ids += [3]
    assert (search.advance([Beam(child, 3, logprob), Beam(child, 4, -9.0)]) == []) == is_decided


def token_ids(outputs):
    return [[o.token_ids for o in output.outputs] for output in outputs]


def test_no_more_blocks_and_copies_than_the_tree_needs(models):
    """A step copies at most one block per beam but one, and beams share what they have in common."""
    _, path = models["qwen3"]
    llm = LLM(path, dtype="float32", block_size=4, num_blocks=300, enable_prefix_caching=False)
    width, prompt = 6, [5] * 41
    schedule, copies = llm.scheduler.schedule, []

    def watched():
        planned = schedule()
        copies.append(len(planned.moves.copies))
        beams = [seq for request in llm.scheduler.running for seq in request.unfinished]
        prefixes = {
            tuple(seq.token_ids[: end + 4]) for seq in beams for end in range(0, len(seq), 4)
        }
        # a block for every different prefix
        assert llm.block_manager.num_used_blocks == len(prefixes)
        return planned

    llm.scheduler.schedule = watched
    llm.generate(
        [prompt], BeamSearchParams(beam_width=width, max_tokens=20, ignore_eos=True), use_tqdm=False
    )
    assert copies[0] == 0 and 0 < sum(copies) and max(copies) <= width - 1
    assert (
        llm.stats()["computed_tokens"] == len(prompt) + width * 19
        and llm.block_manager.num_used_blocks == 0
    )


def test_abort_in_the_middle(models):
    _, path = models["qwen3"]
    llm = LLM(path, dtype="float32", block_size=4, num_blocks=300)
    request_id = llm.add_request(
        [1, 2, 3], BeamSearchParams(beam_width=3, max_tokens=50, ignore_eos=True)
    )
    other = llm.add_request([4, 5, 6], SamplingParams(temperature=0, max_tokens=8))
    for _ in range(4):
        llm.step()
    running = {tuple(seq.output_token_ids) for seq in llm.requests[request_id].sequences}
    assert llm.abort(request_id)
    finished = {}
    while llm.has_unfinished():
        finished |= {output.request_id: output for output in llm.step() if output.finished}
    assert list(finished) == [request_id, other] and llm.block_manager.num_used_blocks == 0
    outputs = finished[request_id].outputs  # the best so far, best first
    assert {tuple(o.token_ids) for o in outputs} == running and all(
        len(o.token_ids) == 4 for o in outputs
    )
    assert [o.finish_reason for o in outputs] == ["abort"] * 3 and [o.index for o in outputs] == [
        0,
        1,
        2,
    ]
    scores = [o.cumulative_logprob for o in outputs]
    assert scores == sorted(scores, reverse=True) and scores[0] < 0
    check_blocks(llm.block_manager, [])


def test_abort_keeps_results_that_are_better_than_what_runs(models):
    """Of a search of width 2: a result, and two beams that run."""
    search = BeamSearch(BeamSearchParams(beam_width=2), frozenset([9]), max_output_tokens=9)
    start = Request(None, None, [1, 2], BeamSearchParams(beam_width=2).sampling_params()).sequences[
        0
    ]
    search.advance([Beam(start, t, p) for t, p in [(9, -1.0), (3, -2.0), (4, -0.5), (5, -6.0)]])
    good, bad = (Request(None, None, [1, 2], SamplingParams()).sequences[0] for _ in range(2))
    good.token_ids += [4, 4]
    bad.token_ids += [3, 3]
    good.cumulative_logprob, bad.cumulative_logprob = -0.8, -7.0
    assert [(beam.token_ids, beam.score) for beam in search.best_so_far([bad, good])] == [
        ([4, 4], -0.4),
        ([9], -1.0),
    ]


def test_a_search_without_a_limit_ends_where_the_cache_is_full(models):
    """Otherwise its beams grow until they fit nowhere, are preempted, and wait forever."""
    options = dict(dtype="float32", block_size=4, num_blocks=20, max_model_len=64)
    llm = LLM(models["qwen3"][1], **options)
    params = BeamSearchParams(beam_width=6, max_tokens=10**12, ignore_eos=True)
    (output,) = llm.beam_search([[1]], params, use_tqdm=False)
    # 20 blocks: 3 for each beam, of 4 tokens, and the last token needs no place
    assert {len(beam.token_ids) for beam in output.outputs} == {12}
    check_blocks(llm.block_manager, [])


def test_bad_requests(models):
    llm = LLM(models["qwen3"][1], dtype="float32", block_size=4, num_blocks=30, max_num_seqs=5)
    with pytest.raises(ValueError, match="params=SamplingParams.* must be BeamSearchParams"):
        llm.beam_search([[1]], SamplingParams())
    with pytest.raises(ValueError, match="may need 80 KV blocks"):
        llm.beam_search([[1]], BeamSearchParams(beam_width=5, max_tokens=64))
    assert not llm.has_unfinished() and llm.block_manager.num_used_blocks == 0
