"""Runners: which one a config and its device ask for."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from nanovllm.config import Config, Limits
from nanovllm.device.threads import Threads
from nanovllm.model_runner import ModelRunner
from nanovllm.models.qwen import Qwen
from nanovllm.schedule import Drawn, Schedule


class Runner(Protocol):
    """Computes schedules: a ModelRunner (model_runner.py). `new_runner` chooses CPURunner on a
    CPU, and the one of parallel/ for several ranks."""

    num_blocks: int
    num_host_blocks: int
    is_asynchronous: bool  # whether `launch` returns before the step is computed

    def launch(self, schedule: Schedule) -> Callable[[], Drawn]:
        """Begins a step. The function that it returns waits for its end."""

    def close(self) -> None:
        """Gives back what it holds. It launches no step afterwards."""


class CPURunner(ModelRunner):
    """A ModelRunner with a number of threads for each step."""

    def __init__(self, *args):
        self.threads = Threads()
        super().__init__(*args)

    def load(self, path: Path, hf_config, **options) -> Qwen:
        model = super().load(path, hf_config, **options)
        self.weights_per_layer = sum(w.numel() for w in model.model.layers[0].parameters())
        return model

    def launch(self, schedule: Schedule) -> Callable[[], Drawn]:
        with self.threads.of_step(schedule.num_tokens * self.weights_per_layer):
            return super().launch(schedule)


def new_runner(
    config: Config, limits: Limits, hf_config, path: Path, device: torch.device
) -> Runner:
    arguments = (config, limits, hf_config, path, device)
    if config.tensor_parallel_size > 1:
        from nanovllm.parallel import runner  # not all builds of PyTorch can

        return runner.new_runner(*arguments)
    return CPURunner(*arguments) if device.type == "cpu" else ModelRunner(*arguments)
