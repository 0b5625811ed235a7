"""Qwen3.5 in the engine: answers against transformers, slots beside blocks, and what a state cannot do.

Run: pytest tests/hybrid/test_hybrid.py [-k random]
"""

import json
import logging
import random
from dataclasses import replace

import pytest
import torch
from backends import PROBLEM
from checkpoints import check_answer, check_answers, new_model, save
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.hybrid.states import StateBlocks

OPTIONS = dict(dtype="float32", num_blocks=100, block_size=8, max_num_seqs=8)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = new_model("qwen3_5_text")
    return made, save(made, tmp_path_factory.mktemp("hybrid"))


def prompts_of(rng: random.Random, count: int, longest: int = 60) -> list[list[int]]:
    return [[rng.randrange(160) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def check_slots(llm: LLM) -> None:
    """Each slot is free, or has as many owners as its count says; and each computed sequence has one."""
    made = [request for request in llm.requests.values() if not request.is_new]
    check_blocks(llm.block_manager, [seq for request in made for seq in request.unfinished])


# --- numbers ---


FAMILIES = ["qwen3_5_text", "qwen3_5_moe_text"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0}


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
        num_experts=rng.choice([4, 5, 8]),
        num_experts_per_tok=rng.randint(1, 4),
        moe_intermediate_size=rng.choice([8, 24]),
        shared_expert_intermediate_size=rng.choice([8, 40]),
        attention_bias=rng.random() < 0.2,
        tie_word_embeddings=rng.random() < 0.5,
        rope_parameters={
            **rng.choice([{"rope_type": "default"}, YARN, LINEAR]),
            "rope_theta": rng.choice([1e4, 1e7]),
            "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    )


@pytest.mark.slow(but_every=9)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(8))  # seeds to 99 have passed
def test_random_configurations_equal_transformers(seed, family, tmp_path):
    """Scarce memory, preemption, chunks of 1 to 64 tokens, several samples, and company."""
    rng = random.Random(seed)
    reference = new_model(family, seed, **random_overrides(rng))
    backend = rng.choice(["torch", "numba"])
    block_size = rng.choice([4, 8, 16])
    llm = LLM(
        save(reference, tmp_path),
        dtype="float32",
        attention_backend=backend,
        num_blocks=rng.choice([160, 200, 2000]) // block_size,
        block_size=block_size,
        max_num_seqs=rng.choice([4, 5, 9]),
        max_num_batched_tokens=rng.choice([9, 16, 33, 64]),
        max_model_len=76,
        overlap=rng.random() < 0.5,
    )
    prompts = prompts_of(rng, 8, 60)
    params = [
        replace(
            GREEDY,
            max_tokens=rng.randint(1, 15),
            n=rng.choice([1, 1, 2]),
            prompt_logprobs=rng.choice([None, 0]),
        )
        for _ in prompts
    ]
    check_answers(reference, llm, prompts, params)
    check_slots(llm)
    assert len(llm.block_manager.free_slots) == llm.limits.max_num_seqs


@pytest.mark.parametrize(
    "backend", ["torch", "numba", pytest.param("triton", marks=pytest.mark.slow)]
)
def test_a_row_in_company_is_the_same_as_alone(backend, model):
    """Mixed steps of decodes and chunks; in Triton's interpreter also steps that are recorded, with padding."""
    if backend == "triton" and PROBLEM is not None:
        pytest.skip(PROBLEM)
    reference, path = model
    options = OPTIONS | {"attention_backend": backend, "max_num_batched_tokens": 16}
    few = backend == "triton"  # the interpreter is slow
    llm = LLM(path, **options | {"max_num_seqs": 2 if few else 8}, overlap=True)
    assert (llm.runner.recorder is not None) == few
    prompts = prompts_of(random.Random(5), 2 if few else 5, 8 if few else 30)
    params = SamplingParams(temperature=0, max_tokens=4 if few else 12, logprobs=0)
    for prompt, output in zip(prompts, check_answers(reference, llm, prompts, params)):
        (alone,) = llm.generate([prompt], params, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_a_wrong_kernel_is_found_before_the_first_request(model, monkeypatch):
    pytest.importorskip("numba")
    from nanovllm.topics.hybrid import numba_delta

    options = OPTIONS | {"attention_backend": "numba", "check_kernels": "always"}
    LLM(model[1], **options)
    right = numba_delta.decode
    monkeypatch.setattr(numba_delta, "decode", lambda *args: right(*args) * 1.5)
    with pytest.raises(ValueError, match=r"differ from PyTorch's here: the delta rule \d+%;"):
        LLM(model[1], **options)


@pytest.mark.slow(but_every=3)
@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize(
    "options, tolerance", [({"dtype": "bfloat16"}, 0.7), ({"kv_cache_dtype": "int8"}, 0.03)]
)
def test_rounded_numbers_are_close(options, tolerance, backend, model):
    reference, path = model
    prompts = prompts_of(random.Random(6), 3)
    llm = LLM(path, **OPTIONS | options, attention_backend=backend, max_num_batched_tokens=16)
    check_answers(reference, llm, prompts, SCORED, tolerance=tolerance)
    assert llm.runner.model.model.norm.weight.dtype == torch.float32
    assert llm.runner.kv_cache.tensor.dtype in (torch.bfloat16, torch.int8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_weights_in_few_bits(bits, family, tmp_path):
    """Of experts, each token has all: a rounded row could choose other ones."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "linear_value_head_dim": 16}
    experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    reference = new_model(family, **sizes, **experts, num_experts_per_tok=8)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.5)
    llm = LLM(save(reference, tmp_path), **OPTIONS, quantization=bits)
    prompts = prompts_of(random.Random(7), 3)
    check_answers(reference, llm, prompts, SCORED, tolerance={"int8": 0.2, "int4": 2.0}[bits])


# --- files ---


def add_vision(reference, path) -> None:
    """The same weights as a checkpoint with a vision model and with mtp."""
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=48)
    tokens = dict(
        image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4
    )
    family = reference.config.model_type.removesuffix("_text")
    text = reference.config.to_dict()
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, **tokens)
    whole = AutoModelForImageTextToText.from_config(config)
    whole.model.language_model.load_state_dict(reference.model.state_dict())
    whole.lm_head.load_state_dict(reference.lm_head.state_dict())
    save(whole, path, save_original_format=False)  # of all experts, one tensor
    tensors = load_file(path / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.zeros(3)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_with_vision_and_mtp(family, tmp_path, caplog):
    reference = new_model(family)
    add_vision(reference, tmp_path)
    with caplog.at_level(logging.INFO):
        llm = LLM(str(tmp_path), **OPTIONS)
    (line,) = [message for message in caplog.messages if "are not loaded" in message]
    assert line.endswith("tensors of model.visual and mtp are not loaded: only text goes in")
    prompts = prompts_of(random.Random(8), 3)
    check_answers(reference, llm, prompts, GREEDY)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"model_type": "qwen3_next"},
            r"model_type='qwen3_next' \(linear_attention layers\) is not supported, only",
        ),
        (
            {"model_type": "nemotron_h", "ssm_state_size": 128},
            r"model_type='nemotron_h' \(states \(Mamba\), linear_attention layers\) is not",
        ),
        (
            {"layer_types": ["linear_attention"] * 4},
            "must be full_attention and linear_attention, both",
        ),
        (
            {"layer_types": ["linear_attention", "sliding_attention", *["full_attention"] * 2]},
            "'sliding_attention'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads=3 does not divide 4 value heads"),
    ],
)
def test_what_is_not_supported_is_named(changes, message, model, tmp_path):
    save(model[0], tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), **OPTIONS)


# --- slots ---


@pytest.mark.parametrize("overlap", [False, True])
def test_scarce_memory_and_slots_that_are_used_again(overlap, model):
    """A slot holds what its last owner has left, here NaN: no other sequence reads it."""
    reference, path = model
    sizes = {"num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    llm = LLM(path, **OPTIONS | sizes, overlap=overlap)
    llm.runner.kv_cache.states[1].fill_(torch.nan)
    prompts = prompts_of(random.Random(9), 6, 40)
    params = replace(GREEDY, max_tokens=24)
    llm.observers.append(lambda *_: check_slots(llm) if not overlap else None)
    check_answers(reference, llm, prompts, params)
    assert llm.scheduler.num_preemptions > 0
    assert len(llm.block_manager.free_slots) == 3


def test_a_prompt_again_computes_all_its_tokens(model, caplog):
    """No hit, in silence or with a wrong state (vllm#40696, #51198, #51250, #54504): one log line says so."""
    reference, path = model
    with caplog.at_level(logging.INFO):
        llm = LLM(path, **OPTIONS)
    assert sum("Prefix caching is off" in message for message in caplog.messages) == 1
    prompt = prompts_of(random.Random(10), 1)[0] + [7] * 20
    for longer in ([], [], [3, 1, 4]):
        check_answers(reference, llm, [prompt + longer], GREEDY)
    assert llm.scheduler.num_cached_tokens == 0


@pytest.mark.parametrize("num_blocks", [100, 10])
def test_samples_copy_the_state_of_their_prompt(num_blocks, model):
    """Each sample is what the first sample of a request with its seed would be alone; with few blocks, also when the
    request was preempted and its samples have tokens of their own."""
    reference, path = model
    options = OPTIONS | {"num_blocks": num_blocks, "max_num_seqs": 6}
    llm = LLM(path, **options, max_num_batched_tokens=8)
    llm.observers.append(lambda *_: check_slots(llm))
    prompts = prompts_of(random.Random(11), 4, 17)
    params = SamplingParams(n=3, temperature=1, seed=4, max_tokens=11, ignore_eos=True, logprobs=0)
    copies: list = []
    copy = llm.runner.kv_cache.copy_slots
    llm.runner.kv_cache.copy_slots = lambda pairs: (copies.extend(pairs.tolist()), copy(pairs))
    outputs = check_answers(reference, llm, prompts, params, is_greedy=False)
    assert len(copies) >= 2 * len(prompts)  # of three owners, the last one copies nothing
    assert (llm.scheduler.num_preemptions > 0) == (num_blocks == 10)
    for output in outputs:
        assert len({tuple(one.token_ids) for one in output.outputs}) == 3


@pytest.mark.parametrize("num_blocks", [100, 10])
def test_beams_take_the_states_of_their_parents(num_blocks, model):
    reference, path = model
    options = OPTIONS | {"num_blocks": num_blocks, "max_num_seqs": 6}
    llm = LLM(path, **options, max_num_batched_tokens=8)
    prompts = prompts_of(random.Random(12), 4, 17)
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    llm.observers.append(lambda *_: check_slots(llm))
    for prompt, output in zip(prompts, llm.beam_search(prompts, params, use_tqdm=False)):
        for beam in output.outputs:
            rows = reference(torch.tensor([prompt + beam.token_ids])).logits[0].log_softmax(-1)
            rows = rows[len(prompt) - 1 : -1]
            expected = rows.gather(1, torch.tensor(beam.token_ids)[:, None]).sum().item()
            assert beam.cumulative_logprob == pytest.approx(expected, abs=1e-3)
    assert (llm.scheduler.num_preemptions > 0) == (num_blocks == 10)
    assert len(llm.block_manager.free_slots) == 6


def test_a_failed_step_and_an_abort_leave_no_state_behind(model):
    reference, path = model
    llm = LLM(path, **OPTIONS, max_num_batched_tokens=16)
    prompts = prompts_of(random.Random(13), 4, 40)
    ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
    forward = llm.runner.forward
    outputs = {}
    for step in range(200):
        if step == 5:  # after the model has run: all states are one token too far

            def fail(inputs):
                forward(inputs)
                llm.runner.forward = forward
                raise RuntimeError("boom")

            llm.runner.forward = fail
        if step == 9:
            llm.abort(ids[1])
        for output in llm.step():
            outputs[output.request_id] = output
        check_slots(llm)
        if not llm.has_unfinished():
            break
    assert llm.recovery.num_failed_steps == 1
    for i in (0, 2, 3):
        assert outputs[ids[i]].outputs[0].finish_reason == "length"
        check_answer(reference, prompts[i], outputs[ids[i]])
    assert len(llm.block_manager.free_slots) == 8


# --- memory, and what a state cannot do ---


def test_states_take_their_memory_before_blocks(model, caplog):
    """A slot of this model is 3 layers of 4 * (3 * 80 + 4 * 8 * 12) bytes: 7,488."""
    path = model[1]
    options = {"dtype": "float32", "block_size": 8, "max_model_len": 256}
    with caplog.at_level(logging.INFO):
        llm = LLM(path, **options, max_num_seqs=200, kv_cache_gib=1e6 / 2**30)
    assert llm.limits.max_num_seqs == llm.scheduler.max_num_seqs == 65  # 66 * 7,488 < 500,000
    num_bytes = llm.runner.shape.state_bytes
    assert num_bytes == sum(part.nbytes for part in llm.runner.kv_cache.states) == 66 * 7488
    assert llm.runner.num_blocks == (1_000_000 - num_bytes) // llm.runner.shape.block_bytes
    assert any("max_num_seqs is 65: the states of more do not fit" in m for m in caplog.messages)
    blocks = f"{llm.runner.num_blocks:,} blocks of 8 tokens"
    (line,) = [message for message in caplog.messages if message.startswith("KV cache")]
    assert blocks in line and line.endswith("; states of 65 sequences, 0.0 GiB")
    # only the layer with full attention has blocks: keys and values of 2 heads of 16 numbers
    assert llm.runner.shape.block_bytes == 2 * 8 * 2 * 16 * 4
    with pytest.raises(ValueError, match="no memory is left for a state of 7,488 bytes"):
        LLM(path, **options, kv_cache_gib=2e4 / 2**30)


class Blocks(BlockManager):
    pass


@pytest.mark.parametrize(
    "options",
    [
        {"preemption_mode": "swap"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"attention_backend": "vattention"},
        {"block_manager_cls": Blocks},
    ],
)
def test_what_a_state_cannot_do_is_said_by_name(options, model, monkeypatch):
    """Guesses leave a state that cannot be taken back (vllm#39273, #40738). Nothing is loaded before that."""
    monkeypatch.setattr("nanovllm.engine.ModelRunner", None)
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}=.*with this model, whose layers have states"):
        LLM(model[1], **OPTIONS | options)


def test_classes_of_a_student(model):
    """Their schedules are checked, and a subclass of StateBlocks has slots."""

    class LastFirst(Scheduler):
        def priority(self, request):
            return -request.arrival

    class Mine(StateBlocks):
        pass

    reference, path = model
    sizes = {"num_blocks": 14, "scheduler_cls": LastFirst, "block_manager_cls": Mine}
    llm = LLM(path, **OPTIONS | sizes, max_num_batched_tokens=16)
    prompts = prompts_of(random.Random(14), 5, 40)
    params = replace(GREEDY, n=2)
    check_answers(reference, llm, prompts, params)
