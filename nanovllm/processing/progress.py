"""Progress: a bar with the requests that are done, and tokens per second."""

import time
from collections.abc import Callable

from tqdm import tqdm

from nanovllm.schedule import Counts, Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

SECONDS_BETWEEN_LOOKS = 0.1


class Progress:
    """Shows how many of the requests have ended. Observes the steps of an engine."""

    def __init__(
        self,
        requests: list[Request],
        scheduler: Scheduler,
        counts: Counts,
        observers: list[Callable[[Schedule, float], None]],
    ):
        self.requests = requests
        self.scheduler = scheduler
        self.counts = counts
        self.observers = observers
        self.start = self.last_look = time.perf_counter()
        self.num_prompt_tokens = scheduler.num_prompt_tokens
        self.num_output_tokens = counts.output_tokens
        self.bar = tqdm(total=len(requests), desc="Prompts", dynamic_ncols=True)

    def __enter__(self) -> None:
        self.observers.append(self.observe)

    def __exit__(self, *_) -> None:
        self.observers.remove(self.observe)
        self.show()
        self.bar.close()

    def observe(self, schedule: Schedule, seconds: float) -> None:
        now = time.perf_counter()
        if now >= self.last_look + SECONDS_BETWEEN_LOOKS:
            self.last_look = now
            self.show()

    def show(self) -> None:
        seconds = time.perf_counter() - self.start
        num_prompt = self.scheduler.num_prompt_tokens - self.num_prompt_tokens
        num_output = self.counts.output_tokens - self.num_output_tokens
        speeds = f"prompt {num_prompt / seconds:.0f}, output {num_output / seconds:.0f} tokens/s"
        self.bar.set_postfix_str(speeds, refresh=False)
        started = [request for request in self.requests if not request.is_new]
        self.bar.update(sum(request.has_ended for request in started) - self.bar.n)
