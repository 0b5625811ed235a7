"""Runners: which one a config and its device ask for."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from nanovllm.config import Config, Limits
from nanovllm.model_runner import ModelRunner
from nanovllm.schedule import Drawn, Schedule


class Runner(Protocol):
    """Computes schedules: a ModelRunner (model_runner.py). `new_runner` chooses the one of
    parallel/ for several ranks."""

    num_blocks: int
    num_host_blocks: int
    is_asynchronous: bool  # whether `launch` returns before the step is computed

    def launch(self, schedule: Schedule) -> Callable[[], Drawn]:
        """Begins a step. The function that it returns waits for its end."""

    def close(self) -> None:
        """Gives back what it holds. It launches no step afterwards."""


def new_runner(
    config: Config, limits: Limits, hf_config, path: Path, device: torch.device
) -> Runner:
    arguments = (config, limits, hf_config, path, device)
    if config.tensor_parallel_size > 1:
        from nanovllm.parallel import runner  # not all builds of PyTorch can

        return runner.new_runner(*arguments)
    return ModelRunner(*arguments)
