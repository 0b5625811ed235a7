"""The model that is measured: the embedded one, one from the hub or a directory, or a real shape
with random weights."""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

from nanovllm.config import EMBEDDED_MODEL
from nanovllm.topics.simulator.cost_model import SHAPES

# No torch up here: the process that only starts the engines needs none.
COMMON = dict(rope_theta=1e6, rms_norm_eps=1e-6, bos_token_id=None, eos_token_id=None)


def write_checkpoint(shape: dict, path: Path) -> None:
    """A bf16 model directory without a tokenizer. One file per layer: no more is ever in memory."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**COMMON | shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    # a run that is interrupted leaves no half model behind
    part = path.with_name(path.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    device, files = "cuda" if torch.cuda.is_available() else "cpu", {}
    generator = torch.Generator(device).manual_seed(0)
    for i, (_, names) in enumerate(groupby(shapes, key=lambda name: name.split(".")[:3])):
        tensors = {}
        for name in names:  # norms are 1, biases 0
            tensor = torch.full(
                shapes[name], float("norm" in name), dtype=torch.bfloat16, device=device
            )
            tensors[name] = (
                tensor.normal_(std=0.02, generator=generator) if tensor.dim() > 1 else tensor
            ).cpu()
        file = f"model-{i:05}.safetensors"
        save_file(tensors, part / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    index = {
        "metadata": {"total_size": sum(2 * s.numel() for s in shapes.values())},
        "weight_map": files,
    }
    (part / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2), encoding="utf-8"
    )
    config.save_pretrained(part)
    # both spellings of what transformers 5 renamed, since engines bring different versions
    both = {
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "rope_theta": (COMMON | shape)["rope_theta"],
    }
    settings = (
        json.loads((part / "config.json").read_bytes())
        | both
        | {"architectures": [type(model).__name__]}
    )
    (part / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    part.rename(path)


def random_model(name: str, weights_dir: Path) -> Path:
    """The directory of a model of SHAPES, which is written if it is not there yet."""
    path = weights_dir.expanduser() / f"{name}-random"
    if not path.is_dir():
        print(f"writing {path} ...", file=sys.stderr)
        with ProcessPoolExecutor(
            1, get_context("spawn")
        ) as pool:  # what CUDA holds goes with the process
            pool.submit(write_checkpoint, SHAPES[name], path).result()
    return path


def model_directory(args) -> Path:
    """Where the model is that the command line of bench.py asks for."""
    if args.random_weights:
        return random_model(args.random_weights, args.weights_dir)
    path = Path(args.model or EMBEDDED_MODEL).expanduser()
    if not path.is_dir():
        from nanovllm.loader import find_model

        path = find_model(args.model)
    return path.resolve()
