"""Damaged model directories: each is refused by a ValueError that names the file, and what is
wrong.

Run: pytest tests/core/test_loader.py [-k generation]
"""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from checkpoints import new_model, save
from fake_engine import go_on
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL
from nanovllm.loader import (
    find_model,
    load_config,
    load_generation_config,
    load_tokenizer,
    weight_files,
)


@pytest.fixture
def embedded(tmp_path) -> Path:
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "embedded"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Without a tokenizer and a generation_config.json."""
    path = tmp_path_factory.mktemp("checkpoint")
    save(new_model(), path)
    (path / "generation_config.json").unlink()
    return path


@pytest.fixture
def directory(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def change(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))


def rope(**settings) -> dict:
    """As transformers 4 writes it, and 5 reads it."""
    return {"rope_parameters": None, "rope_scaling": settings}


# --- config.json ---


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"hidden_size": "32"}, "hidden_size.*32"),
        ({"head_dim": None}, "head_dim.*None|k_norm.*has shape"),
        ({"max_position_embeddings": None}, "max_position_embeddings.*None"),
        (
            {"num_hidden_layers": 1},
            "num_hidden_layers.* 1|num_hidden_layers.*layer_types|does not match its config.json",
        ),
        ({"hidden_size": -1}, "hidden_size=-1 is not a positive integer"),
        ({"vocab_size": 0}, "vocab_size=0 is not a positive integer"),
        ({"num_key_value_heads": 0}, "num_key_value_heads|modulo|zero"),
        ({"eos_token_id": "2"}, "eos_token_id.*'2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: here the activation is silu"),
        (rope(rope_type="linear", factor="2"), "'str'"),
        (rope(rope_type="dynamic", factor=None), "NoneType"),
        (rope(rope_type="yarn", factor=2.0, original_max_position_embeddings="64"), "'str'"),
        (rope(rope_type="default", rope_theta="x"), "'str'"),
        (rope(rope_type=5), "rope_type=5 is not supported, only default, linear"),
    ],
)
def test_a_wrong_value_in_config_json(changes, reason, directory):
    file = directory / "config.json"
    change(file, **changes)
    with pytest.raises(ValueError, match=reason) as error:
        LLM(directory, device="cpu")
    said = str(error.value)
    # transformers 4 does not check all of it: then the checkpoint does not match
    is_checkpoint = re.search("has shape|does not match its config.json", said)
    is_old = transformers.__version__.startswith("4.")
    assert said.startswith(f"{file} cannot be read: ") or (is_old and is_checkpoint), said
    assert "\n" not in said


# --- any of the files ---


READ_BY = {
    "config.json": load_config,
    "generation_config.json": lambda path: load_generation_config(path, load_config(path), None),
    "tokenizer.json": load_tokenizer,
    "tokenizer_config.json": load_tokenizer,
    "model.safetensors.index.json": weight_files,
}


@pytest.mark.parametrize("text", ["{broken", "[]", "5", "null", "", b"\xff\xfe{}"])
@pytest.mark.parametrize("name", READ_BY)
def test_a_file_that_is_no_json_object(name, text, embedded):
    file = embedded / name
    if READ_BY[name] is weight_files:
        (embedded / "model.safetensors").unlink()
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    reads = [READ_BY[name]]
    if text == "{broken":  # the engine takes what these functions say
        reads.append(lambda path: LLM(path, device="cpu", num_blocks=8))
    for read in reads:
        with pytest.raises(ValueError) as error:
            read(embedded)
        assert str(error.value).startswith(f"{file} cannot be read: ")


@pytest.mark.parametrize(
    "index, reason",
    [
        ({}, "weight_map=None is not an object"),
        (
            {"weight_map": ["model.safetensors"]},
            r"weight_map=\['model.safetensors'\] is not an obj",
        ),
    ],
)
def test_an_index_without_a_map(index, reason, directory):
    (directory / "model.safetensors").unlink()
    file = directory / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=reason) as error:
        LLM(directory, device="cpu")
    assert str(error.value).startswith(f"{file} cannot be read: ")


def test_a_whole_file_goes_before_an_index(embedded):
    """As after a merge of shards that has left their index."""
    (embedded / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone"}}')
    assert weight_files(embedded) == [embedded / "model.safetensors"]


# --- generation_config.json ---


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"top_p": 1.5}, "top_p=1.5 is not allowed: it must be above 0 and at most 1"),
        ({"eos_token_id": "2"}, "eos_token_id='2' is not allowed: it must be a token id or a list"),
        ({"eos_token_id": [1, None]}, r"eos_token_id=\[1, None\] is not allowed"),
        ({"eos_token_id": -1}, "eos_token_id=-1 is not allowed"),
        ({"eos_token_id": True}, "eos_token_id=True is not allowed"),
    ],
)
def test_a_wrong_value_in_generation_config_json(changes, reason, embedded):
    file = embedded / "generation_config.json"
    change(file, **changes)
    with pytest.raises(ValueError, match=reason) as error:
        LLM(embedded, device="cpu", num_blocks=8)
    assert str(error.value).startswith(f"{file} cannot be read: ")


@pytest.mark.parametrize(
    "eos_token_id, expected",
    [(5, {5}), ([7, 6], {6, 7}), ([], set()), (None, set()), ([7, 10**6], {7})],
)
def test_end_of_sequence_tokens(eos_token_id, expected, directory):
    """The end tokens of config.json, generation_config.json and the tokenizer together."""
    change(directory / "config.json", eos_token_id=eos_token_id)
    config = load_config(directory)
    assert load_generation_config(directory, config, None) == (SamplingParams(), expected)
    (directory / "generation_config.json").write_text('{"eos_token_id": [3]}')
    tokenizer = SimpleNamespace(eos_token_id=4)
    both = load_generation_config(directory, config, tokenizer)
    assert both == (SamplingParams(temperature=0), {3, 4} | expected)


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("penalty, expected", [(1.05, 1.05), (1.0, 1.0), (None, 1.0)])
def test_a_repetition_penalty_is_a_default(penalty, expected, do_sample, embedded):
    """As in transformers, also if it draws nothing at random."""
    change(embedded / "generation_config.json", repetition_penalty=penalty, do_sample=do_sample)
    defaults = LLM(embedded, device="cpu", num_blocks=8).inputs.default_params
    assert defaults.repetition_penalty == expected


def test_a_directory_without_a_tokenizer(directory):
    assert load_tokenizer(directory) is None


@pytest.mark.parametrize("model", ["~no-such-user/x", "./typo", "a/b/c", "/no/such/place"])
def test_a_path_that_is_not_a_directory(model):
    with pytest.raises(ValueError, match=f"model='{model}' is not a directory"):
        find_model(model)


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.float8_e5m2])
def test_quantized_weights_are_refused(directory, dtype):
    """They were loaded as numbers."""
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.ones(1).to(dtype)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(
        ValueError, match=rf"safetensors: .*up_proj.weight has dtype {dtype}: use the model's unqu"
    ):
        LLM(str(directory), num_blocks=9)


def test_weights_of_more_bits_are_rounded(directory):
    weights = load_file(directory / "model.safetensors")
    save_file({name: x.double() for name, x in weights.items()}, directory / "model.safetensors")
    llm = LLM(str(directory), num_blocks=99, enforce_eager=True)
    (output,) = llm.generate([[1, 2]], use_tqdm=False)
    assert output.finished


def test_a_special_token_in_stop_ends_the_answer():
    """The text of an answer leaves it out, so as a stop string it was never found."""
    llm = LLM(num_blocks=99, device="cpu")
    params = SamplingParams(temperature=0, stop=["<|im_end|>"], ignore_eos=True, max_tokens=40)
    chat = [{"role": "user", "content": "what is 347 + 285?"}]
    (output,) = llm.chat(chat, params, use_tqdm=False)[0].outputs
    assert (output.text, output.finish_reason) == ("347 + 285 = 632", "stop")


def test_logits_that_are_not_finite_end_their_request_only(monkeypatch):
    options = {"enable_prefix_caching": False, "enforce_eager": True}  # the head is a call
    llm = LLM(num_blocks=99, device="cpu", **options)
    head = llm.runner.model.lm_head.forward

    prompts = ["12 + 30 =", "Once upon a time"]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wrong = outputs[0].outputs[0].token_ids[2]
    assert wrong not in outputs[1].outputs[0].token_ids

    def only(hidden):
        logits = head(hidden)
        logits[logits.argmax(-1) == wrong] = torch.nan
        return logits

    monkeypatch.setattr(llm.runner.model.lm_head, "forward", only)
    ids = [llm.add_request(prompt, params) for prompt in prompts]
    last = go_on(llm)
    assert isinstance(last[ids[0]].error, FloatingPointError)
    llm.runner.warm_up()  # a model whose weights are damaged can be loaded
    assert last[ids[1]].outputs[0].token_ids == outputs[1].outputs[0].token_ids
