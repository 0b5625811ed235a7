"""The simulator's second mode: play jobs against a real engine, write each step down, and play them again without it.

    run, steps = record(LLM(), jobs)                                # in real time, as long as the jobs take
    Recording(steps).save("steps.json")
    again = simulate(jobs, config, Recording.load("steps.json"))    # in an instant, at the recorded speed

The loop has the simulator's rule: it looks at the clock once, at the end of a step, and adds all who have arrived until
then. So a replay plans the same steps, and its tokens come at the same times. The config of the replay must say what
the engine's limits are: `num_blocks`, `max_num_batched_tokens`.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nanovllm import LLM, SamplingParams
from nanovllm.roofline import Hardware, Shape
from nanovllm.schedule import Schedule
from nanovllm.sequence import Request
from nanovllm.simulator import Arrivals, Job, Machine, Run, Runs, Served, items_of
from tutorials.performance.steps import Step


def token_ids(runs: Runs, vocab_size: int) -> list[int]:
    """A text for a prompt: at each place of a run stands a random token that only depends on the run's token id and the
    place. So of two runs with the same id, the shorter one is how the longer one begins."""
    return [
        i for token, count in runs for i in random.Random(token).choices(range(vocab_size), k=count)
    ]


def record(
    llm: LLM,
    jobs: Sequence[Job],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Run, list[Step]]:
    """Serves the jobs in real time: when each of their tokens came, and the steps. The engine should be new.

    The seconds of a step are those from the end of the last one, or, after a pause, from the arrival that ended it.
    So they also hold what adding the requests took. An answer ends by `max_tokens`, because a real model does not
    stop where we want. The next turn of a conversation begins with the answer that the model really gave: its tokens
    stand where the job has the run `answer`.
    """
    recorder = Recorder(llm, jobs)
    scheduler = llm.scheduler
    scheduler.schedule, scheduler.preempt = (
        recorder.schedule,
        recorder.preempt,
    )  # watched from outside
    try:
        recorder.play(clock, sleep)
    finally:
        del scheduler.schedule, scheduler.preempt
    return recorder.result(), recorder.steps


class Recorder:
    """One run of `record`."""

    def __init__(self, llm: LLM, jobs: Sequence[Job]):
        self.llm, self.jobs, self.scheduler = llm, jobs, llm.scheduler
        self.run, self.steps = Run([Served(job) for job in jobs]), list[Step]()
        self.prompts = [token_ids(job.prompt, llm.runner.vocab_size) for job in jobs]
        self.plan, self.preempt_it, self.before = (
            self.scheduler.schedule,
            self.scheduler.preempt,
            counters(llm),
        )
        self.arrivals = Arrivals(jobs)

    def play(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        start, now = clock(), 0.0
        while self.arrivals.coming or self.llm.has_unfinished():
            if not self.llm.has_unfinished():
                now = max(now, self.arrivals.coming[0][0])
                sleep(max(0.0, start + now - clock()))
            for when, index in self.arrivals.until(now):
                self.add(when, index)
            self.llm.step()
            seconds = clock() - start - now
            now += seconds
            self.note(now, seconds)

    def add(self, time: float, index: int) -> None:
        job, self.run.requests[index].arrival = self.jobs[index], time
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=job.num_outputs, extra_args=job.extra_args
        )
        self.llm.add_request(self.prompts[index], params, str(index))

    def schedule(self) -> Schedule:
        """Between the planning of a step and its run."""
        self.current = schedule = self.plan()
        self.items = items_of(schedule)
        self.num_used_blocks = self.llm.block_manager.num_used_blocks
        return schedule

    def preempt(self, request: Request, schedule: Schedule) -> None:
        self.run.requests[int(request.request_id)].num_preemptions += 1
        self.preempt_it(request, schedule)

    def note(self, now: float, seconds: float) -> None:
        """A step has ended `now`."""
        sampled, run = self.current.sampled_items, self.run
        self.steps.append(Step(self.items, len(sampled), seconds))
        run.busy_seconds += seconds
        run.kv_use += self.num_used_blocks * seconds
        for _, seq in sampled:
            served = run.requests[index := int(seq.request.request_id)]
            served.token_times.append(now)
            if seq.finish_reason is not None:
                served.num_cached_tokens = seq.request.num_cached_tokens or 0
                for follower in self.arrivals.follow(index, now):
                    self.continue_with(follower, seq.token_ids)

    def continue_with(self, index: int, conversation: list[int]) -> None:
        """The prompt of the next turn begins with what was really said, if the job wants it to."""
        job, last = self.jobs[index], self.jobs[self.jobs[index].after]
        if job.prompt[: len(last.conversation)] == last.conversation:
            self.prompts[index][: len(conversation)] = conversation

    def result(self) -> Run:
        run, steps = self.run, self.steps
        run.seconds = max((served.token_times[-1] for served in run.requests), default=0.0)
        run.num_steps = len(steps)
        run.num_computed_tokens = sum(n for step in steps for n, _ in step.items)
        run.kv_use = run.kv_use / (run.busy_seconds or 1) / len(self.llm.block_manager.blocks)
        for name, count in counters(self.llm).items():
            setattr(run, name, count - self.before[name])
        return run


def counters(llm: LLM) -> dict[str, int]:
    """What the scheduler counts, by the names in `Run`."""
    names = ("num_prompt_tokens", "num_cached_tokens", "num_preemptions", "num_swapped_blocks")
    return {name: getattr(llm.scheduler, name) for name in names}


class Recording(Machine):
    """A machine for one simulation, on which the k-th step takes as long as it was recorded.

    Another step than the recorded one is refused: nobody knows how long it would have taken. So this is for checking
    that a scheduler still does the same, not for comparing schedulers.
    """

    def __init__(self, steps: list[Step]):
        super().__init__(Hardware("recorded", 1.0, 1.0, 0.0))
        self.steps, self.num_replayed = steps, 0

    def seconds(self, shape: Shape, schedule: Schedule, block_size: int) -> float:
        k, self.num_replayed = self.num_replayed, self.num_replayed + 1
        planned = items_of(schedule), len(schedule.sampled_items)
        if k >= len(self.steps):
            raise ValueError(
                f"step {k} was not recorded, the recording has {len(self.steps)} steps: {describe(*planned)}"
            )
        recorded = [tuple(item) for item in self.steps[k].items], self.steps[k].sampled
        if planned != recorded:
            raise ValueError(
                f"step {k} is another one: planned {describe(*planned)}, recorded {describe(*recorded)}"
            )
        return self.steps[k].seconds

    def save(self, path: str | Path) -> None:
        """JSON: (items, sampled, seconds) of each step."""
        lines = ",\n".join(json.dumps(step[:3], separators=(",", ":")) for step in self.steps)
        Path(path).write_text(f"[\n{lines}\n]\n")

    @classmethod
    def load(cls, path: str | Path) -> "Recording":
        rows = json.loads(Path(path).read_text())
        return cls([Step([tuple(item) for item in items], *others) for items, *others in rows])


def describe(items: list[tuple[int, int]], sampled: int) -> str:
    return f"{items} (tokens, context of each sequence), {sampled} sampled"
