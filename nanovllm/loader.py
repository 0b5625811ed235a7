"""Loads a model directory: its configs, its tokenizer, and its safetensors into parameters.

Tensors go straight to their final place, dtype and device, one at a time.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops
from nanovllm.models.qwen import Qwen
from nanovllm.sampling_params import SamplingParams

FILES = [
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.jinja",
]  # weights, configs and tokenizer; no other formats


def find_model(model: str) -> Path:
    """The model's directory: a local one, or that of a hub id, downloaded once. Raises ValueError if there is none."""
    path = Path(model).expanduser()
    if not path.is_dir():
        if (
            path.exists()
            or path.is_absolute()
            or model.startswith((".", "~"))
            or model.count("/") > 1
        ):
            raise ValueError(f"model={model!r} is not a directory")
        from huggingface_hub import snapshot_download

        try:
            path = Path(snapshot_download(model, allow_patterns=FILES))
        except Exception as error:
            why = f"it could not be downloaded from the hub: {error}"
            raise ValueError(f"model={model!r} is not a local directory, and {why}") from error
    if not (path / "config.json").is_file():
        raise ValueError(f"model={model!r} is not a model directory: it has no config.json")
    return path


def load_config(path: Path):
    """The Hugging Face config of a model directory."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path / 'config.json'} cannot be read: {error}") from error


def load_tokenizer(path: Path):
    """The model's tokenizer, or None if its directory has none."""
    if any((path / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return AutoTokenizer.from_pretrained(path)
    return None


def load_generation_config(path: Path, config) -> tuple[SamplingParams, frozenset[int]]:
    """The model's default sampling parameters, and its end-of-sequence tokens."""
    file = path / "generation_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    eos = settings.get("eos_token_id", getattr(config, "eos_token_id", None))
    eos = [] if eos is None else [eos] if isinstance(eos, int) else eos
    if not file.is_file():
        return SamplingParams(), frozenset(eos)
    if not settings.get("do_sample"):
        return SamplingParams(temperature=0.0), frozenset(eos)
    names = [
        name
        for name in ("temperature", "top_k", "top_p", "min_p")
        if settings.get(name) is not None
    ]
    return SamplingParams(**{name: settings[name] for name in names}), frozenset(eos)


def load_model(
    path: Path, config, max_model_len: int, dtype: torch.dtype, device: torch.device, ops: Ops
) -> Qwen:
    """Builds the model and loads every parameter. Raises ValueError if the checkpoint does not match."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # so that no parameter is ever created in another
    try:
        with torch.device(device):
            model = Qwen(config, max_model_len, ops).requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    missing, unexpected = destinations(model), []
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                    if name in missing:
                        load_into(missing.pop(name), tensors.get_tensor(name), name, file)
                    elif not ignorable(name, config):
                        unexpected.append(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or incomplete: {error}") from error
    if missing or unexpected:
        what = f"missing tensors {sorted(missing)}, unexpected tensors {sorted(unexpected)}"
        raise ValueError(f"{path} does not match its config.json: {what}")
    for module in model.modules():
        if isinstance(module, Linear):
            module.prepack()
    return model.eval()


def destinations(model: nn.Module) -> dict[str, Tensor]:
    """Where each tensor of the checkpoint goes: a parameter, or some rows of a merged one."""
    table, seen = {}, set()
    for prefix, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if parameter in seen:  # the head, if it is tied to the embedding
                continue
            seen.add(parameter)
            parent = prefix.rpartition(".")[0]
            slices = module.part_slices if isinstance(module, Linear) else {}
            for part, rows in slices.items():
                table[f"{parent}.{part}.{kind}"] = parameter.data[rows]
            if not slices:
                table[f"{prefix}.{kind}"] = parameter.data
    return table


def load_into(place: Tensor, tensor: Tensor, name: str, file: Path) -> None:
    found, expected = list(tensor.shape), list(place.shape)
    if found != expected:
        raise ValueError(f"{file}: {name} has shape {found}, but config.json requires {expected}")
    place.copy_(tensor)


def ignorable(name: str, config) -> bool:
    """Some checkpoints repeat the tied head, or store the rotary frequencies, which we compute."""
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and config.tie_word_embeddings
    )


def weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    is_sharded = index.is_file()
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if is_sharded
        else ["model.safetensors"]
    )
    for name in names:
        if not (path / name).is_file():
            raise ValueError(
                f"{path} has no {name}: only safetensors checkpoints are supported, whole or sharded"
            )
    return [path / name for name in names]
