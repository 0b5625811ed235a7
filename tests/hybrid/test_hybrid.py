"""Qwen3.5 in the engine: answers against transformers, slots beside blocks, and what a state cannot do.

Run: pytest tests/hybrid/test_hybrid.py [-k random]
"""

import json
import logging
import random

import pytest
import torch
from checkpoints import HYBRID, SHAPE, greedy, new_model, save
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler
from nanovllm.topics.checks.blocks import check_blocks, check_owners
from nanovllm.topics.hybrid.states import StateBlocks

OPTIONS = dict(dtype="float32", num_blocks=100, block_size=8, max_num_seqs=8)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = new_model("qwen3_5_text")
    return made, save(made, tmp_path_factory.mktemp("hybrid"))


def prompts_of(rng: random.Random, count: int, longest: int = 60) -> list[list[int]]:
    return [[rng.randrange(160) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def check_slots(llm: LLM) -> None:
    """Each slot is free, or has as many owners as its count says."""
    manager = llm.block_manager
    seqs = [
        seq for request in llm.requests.values() if not request.is_new for seq in request.unfinished
    ]
    check_blocks(manager, seqs)
    tables = [[seq.state_slot] for seq in seqs if seq.state_slot]
    assert all(seq.state_slot for seq in seqs if seq.num_computed_tokens)
    check_owners(
        "slot", tables, manager.slot_owners[1:] and manager.slot_owners, {0, *manager.free_slots}
    )


@torch.inference_mode()
def check_answer(reference, prompt: list[int], output, tolerance: float = 2e-4) -> None:
    """Log-probabilities of all tokens, and greedy tokens up to ties."""
    for answer in output.outputs:
        token_ids = prompt + answer.token_ids
        expected = reference(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        rows = expected[len(prompt) - 1 : -1]
        for token_id, found, row in zip(answer.token_ids, answer.logprobs, rows):
            assert abs(found[token_id] - row[token_id]) < tolerance
            assert row[token_id] > row.max() - tolerance
        known = (output.prompt_logprobs or [])[1:]
        for i, found in enumerate(known):
            assert abs(found[prompt[i + 1]] - expected[i, prompt[i + 1]]) < tolerance


# --- numbers ---


def random_overrides(rng: random.Random) -> dict:
    kv_heads = rng.choice([1, 2, 3])
    key_heads = rng.choice([1, 2, 3])
    num_layers = rng.randint(2, 6)
    kinds = ["linear_attention", "full_attention"]
    kinds += [rng.choice(kinds) for _ in range(num_layers - 2)]
    rng.shuffle(kinds)
    return dict(
        num_hidden_layers=num_layers,
        layer_types=kinds,
        hidden_size=rng.choice([32, 48, 56]),
        intermediate_size=rng.choice([40, 72]),
        head_dim=rng.choice([8, 16, 24, 64]),
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * rng.choice([1, 2, 4]),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * rng.choice([1, 2, 3]),
        linear_key_head_dim=rng.choice([4, 8, 20, 32]),
        linear_value_head_dim=rng.choice([4, 12, 16, 40]),
        linear_conv_kernel_dim=rng.choice([2, 4, 4, 5]),
        attention_bias=rng.random() < 0.2,
        tie_word_embeddings=rng.random() < 0.5,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": rng.choice([1e4, 1e7]),
            "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    )


@pytest.mark.slow(but_every=20)
@pytest.mark.parametrize("seed", range(100))
def test_random_configurations_equal_transformers(seed, tmp_path):
    """Scarce memory, preemption, chunks of 1 to 64 tokens, several samples, and company."""
    rng = random.Random(seed)
    reference = new_model("qwen3_5_text", seed, **random_overrides(rng))
    backend = rng.choice(["torch", "numba"])
    llm = LLM(
        save(reference, tmp_path),
        dtype="float32",
        attention_backend=backend,
        num_blocks=rng.choice([20, 30, 200]),
        block_size=rng.choice([4, 8, 16]),
        max_num_seqs=rng.choice([4, 5, 9]),
        max_num_batched_tokens=rng.choice([9, 16, 33, 64]),
        max_model_len=76,
        overlap=rng.random() < 0.5,
    )
    prompts = prompts_of(rng, 8, 60)
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=rng.randint(1, 15),
            ignore_eos=True,
            logprobs=0,
            n=rng.choice([1, 1, 2]),
            prompt_logprobs=rng.choice([None, 0]),
        )
        for _ in prompts
    ]
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
        check_answer(reference, prompt, output)
    check_slots(llm)
    assert len(llm.block_manager.free_slots) == llm.limits.max_num_seqs
