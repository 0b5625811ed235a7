"""Configurations, tokenizers and repositories as real models have them: what is read, and what the log says.

Run: pytest tests/core/test_real_models.py
"""

import json

import pytest
import torch
import transformers
from checkpoints import new_model, save
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from nanovllm import LLM, SamplingParams
from nanovllm.layers.rotary import longest_context, rope_table
from nanovllm.loader import find_model, load_config, load_tokenizer
from nanovllm.topics.checks.files import TEXTS

SMALL = dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=72)
SMALL |= dict(num_hidden_layers=2, vocab_size=320, max_position_embeddings=4096, rms_norm_eps=1e-6)


def config_of(path, **changes):
    (path / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama"} | changes))
    return load_config(path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"rope_scaling": YARN | {"attn_factor": 0.5}}, ""),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "a": 1}}, "rope settings, ['a']"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}, "'partial_rotary_factor'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "turns": 1}}, "'turns'"),
        ({"model_type": "mistral", "sliding_window": 64}, "ends at 64 tokens"),
        ({"model_type": "mistral", "sliding_window": 4096}, ""),
    ],
)  # fmt: skip
def test_the_log_says_what_is_not_read(tmp_path, caplog, changes, said):
    config_of(tmp_path, **changes)
    lines = [r.getMessage() for r in caplog.records if r.name.endswith("files")]
    assert len(lines) == bool(said) and all(said in line for line in lines)


@pytest.mark.parametrize("key, scale", [("attn_factor", 0.87824886), ("attention_factor", 1.0)])
def test_the_factor_of_yarn(tmp_path, key, scale):
    """DeepSeek-R1-0528-Qwen3-8B undoes the factor 0.1 ln 4 + 1."""
    config = config_of(tmp_path, rope_parameters=YARN | {"rope_theta": 1e6, key: scale})
    assert rope_table(config, 12, 4)[0, 0].item() == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_rope_as_each_transformers_saves_it(tmp_path, kind):
    settings = YARN | {"rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    before = {"max_position_embeddings": 1024}
    new = config_of(tmp_path, rope_parameters=settings | {"rope_theta": 5e5}, **before)
    old = config_of(tmp_path, rope_scaling=settings, rope_theta=5e5, **before)
    assert rope_table(new, 12, 99).equal(rope_table(old, 12, 99))
    assert longest_context(old) == (1024 if kind == "llama3" else 4096)


def test_a_context_within_the_window(tmp_path):
    reference = new_model("mistral", sliding_window=20)
    save(reference, tmp_path)
    with pytest.raises(ValueError, match="max_model_len=21 is not allowed: it must be at most 20"):
        LLM(str(tmp_path), max_model_len=21)
    llm = LLM(str(tmp_path), dtype="float32", num_blocks=20)
    assert llm.limits.max_model_len == 20
    prompt = [*range(10, 22)]
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    ids = reference.generate(inputs=torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert output.outputs[0].token_ids == ids[0, 12:].tolist()


@pytest.mark.skipif(transformers.__version__ < "5", reason="Qwen3.5 needs transformers 5")
@pytest.mark.parametrize("is_inner", [True, False])
def test_tied_embeddings_of_qwen35(tmp_path, is_inner):
    save(new_model("qwen3_5_text"), tmp_path)
    text = json.loads((tmp_path / "config.json").read_bytes())
    text.pop("tie_word_embeddings", None)
    config = {"model_type": "qwen3_5", "text_config": text}
    (text if is_inner else config)["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path).tie_word_embeddings


# --- tokenizers ---


def trained(pre_tokenizer, decoder, normalizer=None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.normalizer = normalizer
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


BYTES = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
DIGITS = Sequence([Digits(individual_digits=True), BYTES[0]]), decoders.ByteLevel()
PIECES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
SPACES = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


KINDS = [
    ("LlamaTokenizer", BYTES),  # DeepSeek-R1-Distill-Llama
    ("GPT2Tokenizer", DIGITS),  # SmolLM2
    ("LlamaTokenizer", (None, SPACES, PIECES)),  # Llama-2
]


@pytest.mark.parametrize("kind, parts", KINDS)
def test_a_tokenizer_is_that_of_its_file(tmp_path, kind, parts):
    stored = trained(*parts)
    stored.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config_of(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in (*TEXTS, "", " 7", "x" * 9):
        ids = stored.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.backend_tokenizer.decode(ids) == stored.decode(ids)


def test_a_file_of_another_library_is_named(tmp_path, caplog):
    (tmp_path / "tokenizer.model").touch()
    assert load_tokenizer(tmp_path) is None
    assert "has tokenizer.model, but no tokenizer.json" in caplog.text


def test_a_text_that_begins_itself_gets_one_beginning():
    """As the text that a chat template has made."""
    llm = LLM(num_blocks=20)
    begin = "<|endoftext|>"
    token_id = llm.tokenizer.convert_tokens_to_ids(begin)
    llm.tokenizer.bos_token = begin
    llm.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, token_id)]
    )
    for text in ("Hello", f"{begin}Hello"):
        assert llm.inputs.encode(text)[1].count(token_id) == 1


# --- what is downloaded, what is refused ---


@pytest.mark.parametrize("weights", [["1-of-2.safetensors", "2-of-2.safetensors"], None])
def test_only_the_weights_that_the_index_names_are_downloaded(monkeypatch, tmp_path, weights):
    from huggingface_hub.utils import filter_repo_objects

    others = ["consolidated.safetensors", "fp16/model.safetensors", "a/config.json", "config.json"]
    texts = dict.fromkeys(others + (weights or ["model.safetensors"]), "")
    if weights:
        index = {"weight_map": dict(enumerate(weights))}
        texts["model.safetensors.index.json"] = json.dumps(index)
    found = []

    def download(model, **patterns):
        for name in filter_repo_objects(texts, **patterns):
            found.append(name)
            (tmp_path / name).write_text(texts[name])
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_model("mistralai/Some-7B") == tmp_path
    assert {*found} == {*texts} - {*others[:3]}


@pytest.mark.parametrize("name", ["q4.gguf", "folder", "someone/Llama-3.2-1B-GGUF"])
def test_gguf_is_named(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "q4.gguf").touch()
    (tmp_path / "folder/q4.gguf").touch()
    with pytest.raises(ValueError, match="GGUF is not read: take the model's safetensors"):
        find_model(name if "/" in name else str(tmp_path / name))
