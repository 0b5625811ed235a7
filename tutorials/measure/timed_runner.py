"""A runner that knows how long the model's part of a step took. Imports torch and the engine.

That part begins when the tensors of the step are prepared, and ends when its tokens are on the host,
so when the device is done. On CUDA, launches count as the model's: the device works meanwhile.
"""

import time

import torch

from nanovllm import LLM
from nanovllm.model_runner import ModelRunner
from nanovllm.schedule import Schedule
from nanovllm.step import StepInputs


class TimedRunner(ModelRunner):
    model_seconds = 0.0  # of the last step

    def launch(self, schedule: Schedule):
        collect = super().launch(schedule)

        def collect_and_look():
            result = collect()
            if self.device.type == "cuda" and not schedule.sampled:  # else the tokens are here
                torch.cuda.synchronize()
            self.model_seconds = time.perf_counter() - self.model_began
            return result

        return collect_and_look

    def prepare(self, schedule: Schedule) -> StepInputs:
        inputs = super().prepare(schedule)
        self.model_began = time.perf_counter()
        return inputs


def time_runner(llm: LLM) -> None:
    """Makes the runner of a living engine a timed one, with the same weights and the same cache."""
    runner = llm.runner
    runner.__class__ = type("TimedRunner", (TimedRunner, type(runner)), {})
