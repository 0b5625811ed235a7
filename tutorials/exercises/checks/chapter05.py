"""Checks of chapter 05: numbers of a model, another family, rows that the last layer can leave out."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
)
from transformers.utils.logging import disable_progress_bar

from nanovllm.backends import torch_ops
from nanovllm.config import EMBEDDED_MODEL
from nanovllm.models.dense import DenseModel
from tutorials.exercises.checks.expect import expect, unchanged
from tutorials.ladder.qwen3 import Qwen3, attention

SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim tie_word_embeddings"
).split()
MODELS = {
    "the embedded model": (1536, 192, 512, 5, 6, 2, 32, True),
    "Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8, 128, True),
    "Qwen3-4B": (151936, 2560, 9728, 36, 32, 8, 128, True),
    "Qwen3-8B": (151936, 4096, 12288, 36, 32, 8, 128, False),
}


def counted(config: dict) -> int:
    """Of the engine's model, which is built without memory."""
    with torch.device("meta"):
        model = DenseModel(Qwen3Config(**config), torch.empty(0), torch_ops)
    if config["tie_word_embeddings"]:
        model.lm_head.weight = model.model.embed_tokens.weight
    return sum(parameter.numel() for parameter in model.parameters())


def check_1(answers) -> None:
    for name, sizes in MODELS.items():
        config = dict(zip(SIZES, sizes))
        right = counted(config)
        said = unchanged(answers.parameters, config)
        expect(said == right, f"{name} has {right:,} parameters, you say {said}")


BEFORE_ATTENTION = ("input_layernorm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm")


# --- another family ---
@contextmanager
def random_model(family: str, bias: float = 0.0) -> Iterator[tuple[Path, PreTrainedModel]]:
    """A small Qwen2 or Llama with random weights, and biases of about this size; and its
    directory."""
    sizes = dict(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    generator = torch.Generator().manual_seed(0)
    if family == "Qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        size = bias if name.endswith("bias") else 0.3
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    disable_progress_bar()  # of save_pretrained: the check prints one error message
    with TemporaryDirectory() as directory:
        path = Path(directory)
        model.save_pretrained(path)
        settings = json.loads((path / "config.json").read_bytes())
        (path / "config.json").write_text(json.dumps(settings | sizes), encoding="utf-8")
        yield path, model


def causal(layer, q, k, v):
    return attention(q, k, v, torch.ones(len(q), len(q), dtype=torch.bool).tril())


def check_2(answers) -> None:
    ids = torch.tensor([3, 14, 15, 92, 65, 35])
    families = {
        "a Qwen2 whose biases are 0": ("Qwen2",),
        "a Qwen2 with biases": ("Qwen2", 1.0),
        "a Llama, which has no biases": ("Llama",),
    }
    for which, family in families.items():
        with random_model(*family) as (path, theirs):
            right = theirs(ids[None]).logits[0]
            said = answers.Qwen2(path).logits(ids, torch.arange(6), causal)
        expect(said.shape == right.shape, f"the logits have shape {list(said.shape)}")
        off = (said - right).abs().max().item()
        expect(off < 1e-3, f"{which}: your logits and transformers' differ by {off:.3f}")


# --- rows that the last layer can leave out ---
def check_3(answers) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1500, (8,), generator=generator)
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    for num_layers, rows in ((3, [4, 7]), (2, [7, 4]), (3, [2]), (1, [*range(8)])):
        right = first_layers(Qwen3, num_layers).logits(ids, positions, texts)
        check_rows(answers, ids, positions, num_layers, rows, right[rows])


def first_layers(model_cls: type[Qwen3], num_layers: int) -> Qwen3:
    model = model_cls(EMBEDDED_MODEL)
    model.layers = range(num_layers)
    return model


def texts(layer, q, k, v):
    """Two texts, of 5 and 3 tokens."""
    what = f"attend of layer {layer} gets {len(q)} queries and {len(k)} keys, not 8"
    expect(len(q) == len(k) == len(v) == 8, what)
    parts = zip(q.split([5, 3]), k.split([5, 3]), v.split([5, 3]))
    return torch.cat([causal(layer, *part) for part in parts])


def check_rows(answers, ids, positions, num_layers: int, rows: list[int], right) -> None:
    computed: dict[str, int] = {}

    class Counting(answers.LastRows):
        def linear(self, name, x):
            computed[name] = computed.get(name, 0) + len(x)
            return super().linear(name, x)

        def norm(self, name, x):
            computed[name] = computed.get(name, 0) + len(x)
            return super().norm(name, x)

    said = first_layers(Counting, num_layers).logits(ids, positions, texts, torch.tensor(rows))
    what = f"with {num_layers} layers, for rows {rows}"
    expect(said.shape == right.shape, f"{what} the logits have shape {list(said.shape)}")
    off = (said - right).abs().max().item()
    expect(off < 1e-3, f"{what} the logits are wrong by up to {off:.3f}")
    for name, num_rows in computed.items():
        is_last = name.startswith(("norm", f"layers.{num_layers - 1}."))
        enough = len(rows) if is_last and not name.endswith(BEFORE_ATTENTION) else 8
        expect(num_rows == enough, f"{what} {name} computes {num_rows} rows, {enough} are enough")
    num_weights = 11 * num_layers + 1
    what = f"`linear` and `norm` are called for {len(computed)} of {num_weights} weights"
    expect(len(computed) == num_weights, what)
