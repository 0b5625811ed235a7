"""Film: the blocks of a simulated run over time, as the player draws them.

The frames are those of the recorded runs (tutorials/measure/record_runs.py). A simulation has thousands
of steps, so a frame covers several of them. Imports no torch.
"""

from types import SimpleNamespace
from typing import Any

from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.topics.server.live import Camera

NUM_FRAMES = 80
MOST_BLOCKS = 4096  # of a cache that is filmed


class Film:
    """Watches one scheduler. Takes a frame after each `steps_per_frame` steps, and after twice as many
    whenever it has twice as many frames as it should."""

    def __init__(self, steps_per_frame: int):
        self.steps_per_frame = max(1, steps_per_frame)
        self.frames: list[dict[str, Any]] = []
        self.counts = SimpleNamespace(steps=0, computed_tokens=0, output_tokens=0)
        self.scheduler: Scheduler | None = None
        self.schedules: list[Schedule] = []  # since the last frame
        self.time = 0.0  # of the last frame

    def is_of(self, scheduler: Scheduler) -> bool:
        """Of several replicas, it shows the one that steps first."""
        if self.scheduler is None:
            self.scheduler = scheduler
            manager = scheduler.block_manager
            seen = SimpleNamespace(
                scheduler=scheduler, block_manager=manager, counts=self.counts, requests={}
            )
            self.camera = Camera(seen)
        return self.scheduler is scheduler

    def after_step(self, schedule: Schedule) -> None:
        self.schedules.append(schedule)
        self.counts.steps += 1
        self.counts.computed_tokens += schedule.num_tokens
        self.counts.output_tokens += len(schedule.sampled)
        has_ended = not self.scheduler.running and not self.scheduler.waiting
        is_small = len(self.scheduler.block_manager.blocks) <= MOST_BLOCKS
        if is_small and (len(self.schedules) >= self.steps_per_frame or has_ended):
            self.take()

    def take(self) -> None:
        now = self.scheduler.clock()
        self.camera.start_over()  # each frame is whole: one can go to any of them
        frame = self.camera.frame(self.schedules, now - self.time, now)
        while rest := self.camera.requests([])["tables"]:  # it tells only so much at once
            frame["tables"] += rest
        self.frames.append(frame)
        self.schedules, self.time = [], now
        if len(self.frames) % (2 * NUM_FRAMES) == 0:
            self.steps_per_frame *= 2

    def run(self, title: str) -> dict[str, Any]:
        """A recorded run for the player."""
        if not self.frames:
            return {}
        each = "every step" if self.steps_per_frame == 1 else f"{self.steps_per_frame} steps"
        return {
            "title": title,
            "explanation": f"One picture for {each} of the simulation.",
            "prompts": {},
            "frames": self.frames,
        }


def filmed(scheduler_cls: type[Scheduler], film: Film) -> type[Scheduler]:
    """The same scheduler, in front of the camera. Decides as before."""

    class Filmed(scheduler_cls):
        def update(self, schedule: Schedule, *args) -> None:
            super().update(schedule, *args)
            if film.is_of(self):
                film.after_step(schedule)

    Filmed.__name__ = scheduler_cls.__name__  # it stands in the messages
    Filmed.__qualname__ = scheduler_cls.__qualname__
    return Filmed
