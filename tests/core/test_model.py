"""Logits against transformers, and what the loader accepts and refuses.

Run: pytest tests/core/test_model.py [-k logits]
"""

import json
import re

import pytest
import torch
from checkpoints import new_model, save
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3Config

from nanovllm import LLM, SamplingParams
from nanovllm.backends import torch_ops
from nanovllm.device.onednn import convert
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.linear import Linear
from nanovllm.layers.rotary import rope_table
from nanovllm.loader import FAMILIES, load_config, load_model
from nanovllm.models.dense import check_supported, head_dim_of


def rope(kind: str, **settings) -> dict:
    """The same rope settings as transformers 4 and 5 want them."""
    settings = {"rope_type": kind, **settings}
    if hasattr(AutoConfig.for_model("qwen3"), "rope_parameters"):
        return {"rope_parameters": {"rope_theta": 10_000.0, **settings}}
    return {"rope_scaling": settings, "rope_theta": 10_000.0}


def load(path, dtype=torch.float32):
    config = load_config(path)
    return load_model(path, config, 256, dtype, torch.device("cpu"), torch_ops, convert), config


@torch.inference_mode()
def logits_of(
    model, config, token_ids: list[int], chunks: list[int], block_size: int = 8
) -> torch.Tensor:
    """All logits of one sequence that is computed chunk by chunk, in blocks in reverse order."""
    num_blocks = -(-len(token_ids) // block_size)
    shape = (
        2,
        config.num_hidden_layers,
        num_blocks,
        block_size,
        config.num_key_value_heads,
        head_dim_of(config),
    )
    cache = torch.zeros(shape, dtype=model.model.embed_tokens.weight.dtype)
    table = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32)
    logits, start = [], 0
    for length in chunks:
        positions = torch.arange(start, start + length)
        batch = Batch(
            kv_cache=KVCache(cache),
            slot_mapping=table[positions // block_size].long() * block_size
            + positions % block_size,
            cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32),
            context_lens=torch.tensor([start + length], dtype=torch.int32),
            cu_blocks=torch.tensor([0, num_blocks], dtype=torch.int32),
            block_tables=table,
        )
        batch.layout = torch_ops.layout(batch)
        logits.append(
            model.lm_head(
                model(torch.tensor(token_ids[start : start + length]), positions, batch)
            ).float()
        )
        start += length
    return torch.cat(logits)


# a speed is kept, divided by 8, or between: the contexts of this model have all three
LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
CASES = {
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 gqa 1": ("qwen3", {"num_key_value_heads": 4}),
    "qwen3 gqa 4": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3 gqa 7, head_dim is not hidden / heads": (
        "qwen3",
        {"num_attention_heads": 14, "head_dim": 20},
    ),
    "qwen3 attention bias": ("qwen3", {"attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 gqa 7": ("qwen2", {"hidden_size": 56, "num_attention_heads": 14}),
    "qwen2 gqa 1": ("qwen2", {"num_key_value_heads": 4}),
    "llama": ("llama", {}),
    "llama tied, llama3 rope": ("llama", {"tie_word_embeddings": True, **LLAMA3}),
    "llama biases": ("llama", {"attention_bias": True, "num_key_value_heads": 1}),
    "mistral, head_dim is not hidden / heads": ("mistral", {"head_dim": 20}),
    "linear rope": ("qwen3", rope("linear", factor=4.0)),
    "dynamic rope": ("qwen3", rope("dynamic", factor=2.0)),
    "yarn rope": ("qwen3", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "yarn rope, qwen2": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    family, overrides = CASES[case]
    reference = new_model(family, **overrides)
    save(reference, tmp_path)
    model, config = load(tmp_path)
    token_ids = torch.randint(0, 160, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    for chunks in ([41], [16, 16, 9], [1, 7, 8, 9, *[1] * 16]):
        torch.testing.assert_close(
            logits_of(model, config, token_ids, chunks), expected, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_bfloat16_weights_stay_bfloat16_and_close(family, tmp_path):
    reference = new_model(family)
    save(reference, tmp_path)
    model, config = load(tmp_path, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {
        torch.bfloat16
    } and torch.get_default_dtype() == torch.float32
    with torch.inference_mode():
        expected = reference.bfloat16()(torch.tensor([[5, 6, 7, 8]])).logits[0].float()
    torch.testing.assert_close(
        logits_of(model, config, [5, 6, 7, 8], [4]), expected, atol=0.5, rtol=0.1
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding_unless_it_is_prepacked(tied, dtype, tmp_path):
    """A prepacked weight cannot be looked up in, so there the embedding stays as it is and the head is a second tensor."""
    save(new_model(tie_word_embeddings=tied), tmp_path)
    model, _ = load(tmp_path, dtype)
    assert not model.model.embed_tokens.weight.is_mkldnn
    one = tied and not model.lm_head.weight.is_mkldnn
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family, tied", [("qwen2", True), ("qwen3", False)])
def test_prepacked_weights_give_the_same_logits(family, tied, dtype, tmp_path, monkeypatch):
    """Also with a bias, for a tied head beside its embedding, and where PyTorch cannot prepack."""
    save(new_model(family, tie_word_embeddings=tied), tmp_path)
    model, config = load(tmp_path, dtype)
    if not model.lm_head.weight.is_mkldnn:
        pytest.skip("this PyTorch cannot prepack on this CPU")
    assert not model.model.embed_tokens.weight.is_mkldnn
    monkeypatch.setattr("nanovllm.device.onednn.onednn_is_faster", lambda dtype: False)
    plain, _ = load(tmp_path, dtype)
    assert not plain.lm_head.weight.is_mkldnn
    actual, expected = (logits_of(m, config, list(range(40)), [40]) for m in (model, plain))
    tolerance = dict(atol=1e-4, rtol=1e-4) if dtype == torch.float32 else dict(atol=0.3, rtol=0.1)
    torch.testing.assert_close(actual, expected, **tolerance)


def test_sharded_checkpoint(tmp_path):
    reference = new_model()
    save(reference, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, _ = load(tmp_path)
    expected = reference.model.layers[1].self_attn.k_proj.weight
    weight = model.model.layers[1].self_attn.qkv_proj.weight
    weight = weight.to_dense() if weight.is_mkldnn else weight
    assert torch.equal(weight[64:96], expected)


def change_tensors(path, change) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_missing_and_unexpected_tensors_are_listed(tmp_path):
    save(new_model(), tmp_path)

    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.0.self_attn.k_proj.weight"]
        tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(1)

    change_tensors(tmp_path, change)
    with pytest.raises(ValueError) as error:
        load(tmp_path)
    message = str(error.value)
    assert (
        "missing tensors ['model.layers.0.self_attn.k_proj.weight', 'model.norm.weight']" in message
    )
    assert "unexpected tensors ['model.layers.0.mlp.extra.weight']" in message


@pytest.mark.parametrize(
    "name, found, expected",
    [
        ("model.norm", [7], [48]),
        *(("model.layers.0.mlp.down_proj", found, [48, 72]) for found in ([72, 48], [48, 1], [1])),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_named(name, found, expected, tmp_path):
    save(new_model(), tmp_path)
    wrong = {f"{name}.weight": torch.zeros(found)}
    change_tensors(tmp_path, lambda tensors: tensors.update(wrong))
    message = (
        f"model.safetensors: {name}.weight has shape {found}, but config.json requires {expected}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path)


def test_repeated_tied_head_and_stored_frequencies_are_no_error(tmp_path):
    save(new_model(tie_word_embeddings=True), tmp_path)
    change_tensors(
        tmp_path,
        lambda tensors: tensors.update(
            {
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
            }
        ),
    )
    load(tmp_path)


def test_truncated_safetensors(tmp_path):
    file = tmp_path / "model.safetensors"
    save(new_model(), tmp_path)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="model.safetensors is damaged or incomplete"):
        load(tmp_path)


def test_a_shard_that_is_not_there(tmp_path):
    save(new_model(), tmp_path, max_shard_size="40KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ValueError, match="has no model-00002-of-"):
        load(tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, r"'gpt2' \(learned positions\) is not supported, only qwen2"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported"),
        (
            {
                "model_type": "qwen9_vl",
                "vision_config": {"depth": 2},
                "text_config": {"num_experts": 8, "layer_types": ["mamba", "full_attention"] * 2},
            },
            r"model_type='qwen9_vl' \(images, experts, mamba layers\) is not supported, only qwen2",
        ),
        (
            {"model_type": "llama", "mlp_bias": True, "hidden_act": "gelu"},
            "hidden_act='gelu', mlp_bias=True is not supported",
        ),
        (
            {"model_type": "mistral", "layer_types": ["full_attention"] * 2},
            "model_type='ministral' is not supported",
        ),
    ],
)
def test_unsupported_configs_name_what_is_supported(changes, message, tmp_path):
    family = changes.get("model_type", "qwen3")
    save(new_model(family if family in FAMILIES else "qwen2"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))
    with pytest.raises(ValueError, match=message):
        check_supported(load_config(tmp_path))


@pytest.mark.parametrize("settings", [{}, {"rope_type": "dynamic", "factor": 2.0}])
def test_rope_settings_count(settings):
    parameters = {"rope_type": "default", "rope_theta": 5e5} | settings
    config = Qwen3Config(head_dim=16, max_position_embeddings=32, rope_parameters=parameters)
    theta = 5e5
    if settings:  # as for 512 tokens, with twice the context
        theta *= (2.0 * 512 / 32 - 1) ** (16 / 14)
    angles = torch.outer(torch.arange(512.0), theta ** -(torch.arange(8.0) / 8))
    expected = torch.cat([angles.cos(), angles.sin()], dim=1)
    torch.testing.assert_close(rope_table(config, 16, 512), expected, atol=1e-4, rtol=0)


def test_a_layer_is_nine_launches():
    """Operations that the backend or a matrix does in the first layer, in a decode: chapter 11 counts with them."""
    llm = LLM(num_blocks=16, block_size=4, device="cpu")
    llm.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    llm.step()
    calls = []

    class Noted:
        def __init__(self, ops):
            self.ops = ops

        def __getattr__(self, name):
            calls.append(name)
            return getattr(self.ops, name)

    for module in llm.runner.model.model.layers[0].modules():
        if hasattr(module, "ops"):
            module.ops = Noted(module.ops)
        if isinstance(module, Linear):
            module.register_forward_pre_hook(lambda *args: calls.append("linear"))
    llm.step()
    assert len(calls) == 9 and calls.count("rotate_and_store") == 1
