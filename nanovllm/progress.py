"""Progress: a bar with the requests that are done, and tokens per second."""

import time

from tqdm import tqdm

from nanovllm.outputs import RequestOutput
from nanovllm.scheduler import Scheduler
from nanovllm.stats import Counts

SECONDS_BETWEEN_LOOKS = 0.1


class Progress:
    """Of these outputs, which have just been asked for."""

    def __init__(self, outputs: list[RequestOutput], scheduler: Scheduler, counts: Counts):
        self.outputs = outputs
        self.scheduler = scheduler
        self.counts = counts
        self.start = self.last_look = time.perf_counter()
        self.num_prompt_tokens = scheduler.num_prompt_tokens
        self.num_output_tokens = counts.output_tokens
        self.bar = tqdm(total=len(outputs), desc="Prompts", dynamic_ncols=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.last_look = 0.0
        self.show()
        self.bar.close()

    def show(self) -> None:
        """To be called after each step; looks ten times a second."""
        now = time.perf_counter()
        if now < self.last_look + SECONDS_BETWEEN_LOOKS:
            return
        self.last_look = now
        seconds = now - self.start
        num_prompt = self.scheduler.num_prompt_tokens - self.num_prompt_tokens
        num_output = self.counts.output_tokens - self.num_output_tokens
        speeds = f"prompt {num_prompt / seconds:.0f}, output {num_output / seconds:.0f} tokens/s"
        self.bar.set_postfix_str(speeds, refresh=False)
        self.bar.update(sum(output.finished for output in self.outputs) - self.bar.n)
