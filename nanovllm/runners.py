"""Which runner a config asks for."""

from pathlib import Path

import torch

from nanovllm.config import Config, Limits
from nanovllm.model_runner import ModelRunner


def new_runner(
    config: Config, limits: Limits, hf_config, path: Path, device: torch.device
) -> ModelRunner:
    arguments = (config, limits, hf_config, path, device)
    if config.tensor_parallel_size == 1:
        return ModelRunner(*arguments)
    from nanovllm import parallel  # not all builds of PyTorch can

    return parallel.new_runner(*arguments)
