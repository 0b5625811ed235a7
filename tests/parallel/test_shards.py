"""Shards without processes: their parts of the files, and engines whose ranks are threads, against the
whole model.

Run: pytest tests/parallel/test_shards.py --slow
"""

import os

import pytest
import torch
from checkpoints import new_model, save
from fake_engine import go_on
from safetensors import safe_open
from thread_group import Threads, one_rank

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.config import EMBEDDED_MODEL
from nanovllm.loader import load_config
from nanovllm.model_runner import ModelRunner
from nanovllm.topics.parallel.shards import Shard

EIGHT_HEADS = {
    "hidden_size": 32,
    "intermediate_size": 50,  # divides by neither 3 nor 4
    "num_attention_heads": 8,
    "vocab_size": 101,
}
SHAPES = {
    "qwen3": {"head_dim": 8, **EIGHT_HEADS},
    "qwen3_bias": {"attention_bias": True, **EIGHT_HEADS},
    "qwen3_tied": {"head_dim": 8, "tie_word_embeddings": True, **EIGHT_HEADS},
    "qwen2": {"family": "qwen2", **EIGHT_HEADS},
    "llama": {"family": "llama", "attention_bias": True, **EIGHT_HEADS},
    "qwen3_moe": {"family": "qwen3_moe", "mlp_only_layers": [1], **EIGHT_HEADS},
    "hybrid": {"family": "qwen3_5_text", "linear_num_key_heads": 4, **EIGHT_HEADS},
    "hybrid_moe": {"family": "qwen3_5_moe_text", "linear_num_key_heads": 4, **EIGHT_HEADS},
    "qwen2_12_heads": {
        "family": "qwen2",
        "hidden_size": 48,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
    },
}
# each number of heads would be compiled
OPTIONS = {"dtype": "float32", "num_blocks": 32, "attention_backend": "torch"}
IDS = [[3, 1, 4, 1, 5, 9, 2, 6], [100, 0, 50], list(range(30))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Where a model of this shape is."""
    folder = tmp_path_factory.mktemp("models")

    def path_of(shape: str):
        path = folder / shape
        if not path.exists():
            save(new_model(**SHAPES[shape]), path)
        return path

    return path_of


def same(outputs, expected) -> None:
    """Tokens, and log-probabilities but for rounding."""
    for output, one in zip(outputs, expected, strict=True):
        for ours, theirs in zip(output.outputs, one.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            for row, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
                assert row.keys() == other.keys()
                for token_id, logprob in row.items():
                    assert abs(logprob - other[token_id]) < 1e-3


@pytest.mark.slow(but_every=7)
@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("shape", [name for name in SHAPES if "12" not in name])
def test_the_summands_add_up_to_the_whole(models, shape, size):
    path = models(shape)
    expected = LLM(str(path), **OPTIONS).generate(IDS, GREEDY, use_tqdm=False)
    ranks = Threads(path, size, **OPTIONS)
    with ranks as llm:
        at_start = ranks.leader.group.num_added  # kernels that are compiled have had their steps
        same(llm.generate(IDS, GREEDY, use_tqdm=False), expected)
    per_step = 1 + 2 * len(ranks.leader.model.model.layers)  # two per layer
    assert ranks.leader.group.num_added - at_start == llm.counts.steps * per_step


@pytest.mark.parametrize(
    "size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (6, 12))]
)
def test_ranks_that_divide_other_numbers(models, size):
    path = models("qwen2_12_heads")
    expected = LLM(str(path), **OPTIONS).generate(IDS, GREEDY, use_tqdm=False)
    with Threads(path, size, **OPTIONS) as llm:
        same(llm.generate(IDS, GREEDY, use_tqdm=False), expected)


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="os.register_at_fork is not there")
def test_one_rank_alone(models):
    path = str(models("qwen3_tied"))
    expected = LLM(path, **OPTIONS).generate(IDS, GREEDY, use_tqdm=False)
    llm = one_rank("cpu", model=path, **OPTIONS)
    at_start = llm.runner.group.num_gathered
    same(llm.generate(IDS, GREEDY, use_tqdm=False), expected)
    assert llm.runner.group.num_gathered - at_start == llm.counts.steps


@pytest.mark.parametrize("shape", [name for name in SHAPES if "hybrid" not in name])
def test_each_rank_reads_its_part_and_all_parts_are_the_whole(models, shape):
    path = models(shape)
    size = 2
    shards = [Shard(load_config(path), rank, size) for rank in range(size)]
    with safe_open(path / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            whole = tensors.get_tensor(name)
            parts = [shard.read(tensors, name) for shard in shards]
            *_, layer, kind = name.split(".")
            if layer in shards[0].rows:
                assert [len(part) for part in parts] == [-(-len(whole) // size)] * size
                assert torch.equal(torch.cat(parts)[: len(whole)], whole)
                assert not torch.cat(parts)[len(whole) :].any()
            elif layer in shards[0].columns and kind == "weight":
                assert torch.equal(torch.cat(parts, 1)[:, : whole.shape[1]], whole)
                assert not torch.cat(parts, 1)[:, whole.shape[1] :].any()
            elif layer in shards[0].columns:
                assert torch.equal(sum(parts), whole)  # a bias is added once
            else:
                assert all(torch.equal(part, whole) for part in parts)


def test_which_rank_has_which_kv_head(models):
    """8 query heads, 2 KV heads, 4 ranks: query heads 0 to 3 belong to KV head 0."""
    config = load_config(models("qwen3"))
    parts = [Shard(config, rank, 4).rows for rank in range(4)]
    assert [(part["q_proj"].begin // 8, part["q_proj"].end // 8) for part in parts] == [
        (0, 2),
        (2, 4),
        (4, 6),
        (6, 8),
    ]
    assert [part["k_proj"].begin // 8 for part in parts] == [0, 0, 1, 1]


def test_a_system_without_fork_has_no_ranks(models, monkeypatch):
    if hasattr(os, "register_at_fork"):
        monkeypatch.delattr(os, "register_at_fork")
    sentence = "tensor_parallel_size=2 is not allowed: ranks run on Linux and macOS only"
    with pytest.raises(ValueError, match=sentence):
        LLM(str(models("qwen3")), tensor_parallel_size=2)


def test_a_file_that_does_not_fit_its_config(models):
    config = load_config(models("qwen3"))
    config.intermediate_size = 49  # rounded up it would fit
    shard = Shard(config, 0, 2)
    with safe_open(models("qwen3") / "model.safetensors", framework="pt") as tensors:
        for name in ("gate_proj", "down_proj"):
            with pytest.raises(ValueError, match="a side of 50, but config.json requires 49"):
                shard.read(tensors, f"model.layers.0.mlp.{name}.weight")


# --- whole engines, with two ranks ---

SCARCE = {"dtype": "float32", "num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 16}
PROMPTS = ["Once upon a time", "Tell me a story about a duck.", "17 + 25 =", "Once upon a time"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, params",
    [
        ("swap", SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1)),
        ("recompute", SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=20, n=2)),
        # with seed=1, two tokens are so near to each other in a draw that rounding decides
        ("swap", SamplingParams(temperature=1.0, frequency_penalty=0.5, seed=2, max_tokens=20)),
        ("recompute", BeamSearchParams(beam_width=3, max_tokens=12)),
    ],
    ids=["greedy", "samples", "penalties", "beams"],
)
def test_as_with_one_rank(params, mode):
    """In chunks, with prefixes that are shared and copied, and with too little memory."""
    options = SCARCE | {"preemption_mode": mode}
    one = LLM(**options)
    expected = one.generate(PROMPTS, params, use_tqdm=False)
    with Threads(EMBEDDED_MODEL, 2, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    same(outputs, expected)
    names = ("preemptions", "prefix_cache_hit_tokens", "steps")
    assert [llm.stats()[name] for name in names] == [one.stats()[name] for name in names]
    assert llm.stats()["preemptions"] > 0
    if getattr(params, "prompt_logprobs", None):
        for output, other in zip(outputs, expected):
            assert len(output.prompt_logprobs) == len(other.prompt_logprobs)
            for row, theirs in zip(output.prompt_logprobs[1:], other.prompt_logprobs[1:]):
                assert row.keys() == theirs.keys()


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("name", ["sample", "prepare"])
def test_a_fault_of_one_request_ends_it_alone(monkeypatch, name):
    """Before the others hear of the step, and while they wait for it to end."""
    expected = LLM(**SCARCE).generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    with Threads(EMBEDDED_MODEL, 2, **SCARCE) as llm:
        plain = getattr(ModelRunner, name)

        def failing(*args):
            schedule = args[-1]
            if any(item.seq.request.params.max_tokens == 13 for item in schedule.items):
                raise RuntimeError("its own fault")
            return plain(*args)

        monkeypatch.setattr(ModelRunner, name, failing)
        guilty = SamplingParams(temperature=0, max_tokens=13)
        llm.add_request("I am guilty", guilty, request_id="guilty")
        ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
        outputs = go_on(llm)
        assert "its own fault" in str(outputs["guilty"].error)
        same([outputs[i] for i in ids], expected)
        assert llm.stats()["kv_blocks_used"] == 0
