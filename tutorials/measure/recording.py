"""The simulator's second mode: play jobs against a real engine, write each step down, and play them
again without it.

    run, steps = record(LLM(), jobs)                     # in real time, as long as the jobs take
    again = simulate(jobs, config, Recording(steps))     # in an instant, at the recorded speed

The loop has the simulator's rule: it looks at the clock once, at the end of a step, and adds
all requests that have arrived until then. So a replay plans the same steps, and its tokens come at the same
times. The config of the replay must say what the engine's limits are: `num_blocks`,
`max_num_batched_tokens`.
"""

import random
import time
from collections.abc import Callable, Sequence
from heapq import heappop

from nanovllm import LLM, SamplingParams
from nanovllm.schedule import Schedule
from nanovllm.sequence import Request
from nanovllm.sequence import Sequence as Seq
from nanovllm.topics.decoding.drafts import Draft
from nanovllm.topics.simulator.answers import WRONG, JobProposer
from nanovllm.topics.simulator.cost_model import Hardware, Items, Shape
from nanovllm.topics.simulator.jobs import Arrivals, Job, Run, Runs, Served
from nanovllm.topics.simulator.machines import Machine
from nanovllm.topics.simulator.replica import items_of
from tutorials.measure.steps import Step


def token_ids(runs: Runs, vocab_size: int) -> list[int]:
    """A text for a prompt: at each place of a run stands a random token that only depends on the
    run's token id and the place. So of two runs with the same id, the shorter one is how the longer
    one begins."""
    return [
        i for token, count in runs for i in random.Random(token).choices(range(vocab_size), k=count)
    ]


def params_of(job: Job) -> SamplingParams:
    return SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=job.num_outputs, extra_args=job.extra_args
    )


def record(
    llm: LLM,
    jobs: Sequence[Job],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Run, list[Step]]:
    """Serves the jobs in real time: when each of their tokens came, and the steps. The engine
    should be new.

    The seconds of a step count from the end of the last one, or, after a pause, from the
    arrival that ended it. So they also hold what adding the requests took. An answer ends by
    `max_tokens`, because a real model does not stop where we want. The next turn of a conversation
    begins with the answer that the model really gave: its tokens stand where the job has the run
    `answer`.
    """
    recorder = Recorder(llm, jobs)
    llm.observers.append(recorder.observe)
    try:
        recorder.play(clock, sleep)
    finally:
        llm.observers.remove(recorder.observe)
    return recorder.result(), recorder.steps


class Recorder:
    """One run of `record`."""

    def __init__(self, llm: LLM, jobs: Sequence[Job]):
        self.llm = llm
        self.jobs = jobs
        self.run = Run([Served(job) for job in jobs])
        self.steps: list[Step] = []
        self.prompts = [token_ids(job.prompt, llm.runner.vocab_size) for job in jobs]
        self.before = counters(llm)
        self.arrivals = Arrivals(jobs)
        self.running: list[Request] = []

    def play(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        start = clock()
        now = 0.0
        while self.arrivals.coming or self.llm.has_unfinished():
            if not self.llm.has_unfinished():
                now = max(now, self.arrivals.coming[0][0])
                sleep(max(0.0, start + now - clock()))
            while self.arrivals.coming and self.arrivals.coming[0][0] <= now:
                self.add(*heappop(self.arrivals.coming))
            self.llm.step()
            seconds = clock() - start - now
            now += seconds
            self.note(now, seconds)

    def observe(self, schedule: Schedule, seconds: float) -> None:
        """The engine tells what it has done, and how long it took by its own clock."""
        self.schedule = schedule

    def add(self, time: float, index: int) -> None:
        self.run.requests[index].arrival = time
        self.llm.add_request(self.prompts[index], params_of(self.jobs[index]), str(index))

    def note(self, now: float, seconds: float) -> None:
        """A step has ended `now`."""
        schedule = self.schedule
        run = self.run
        self.steps.append(Step(items_of(schedule), num_rows(schedule), seconds))
        run.busy_seconds += seconds
        run.kv_use += schedule.num_used_blocks * seconds
        self.note_preemptions()
        for seq in schedule.sampled:
            index = int(seq.request.request_id)
            served = run.requests[index]
            served.token_times.append(now)
            if seq.finish_reason is not None:
                served.num_cached_tokens = seq.request.num_cached_tokens or 0
                for follower in self.arrivals.follow(index, now):
                    self.continue_with(follower, seq.token_ids)

    def note_preemptions(self) -> None:
        """Counts for each request that ran, runs no longer, and has not ended."""
        running = [*self.llm.scheduler.running]
        for request in set(self.running).difference(running):
            if not request.has_ended:
                self.run.requests[int(request.request_id)].num_preemptions += 1
        self.running = running

    def continue_with(self, index: int, conversation: list[int]) -> None:
        """The prompt of the next turn begins with what was really said, if the job wants it to."""
        job = self.jobs[index]
        last = self.jobs[job.after]
        if job.prompt[: len(last.conversation)] == last.conversation:
            self.prompts[index][: len(conversation)] = conversation

    def result(self) -> Run:
        run = self.run
        steps = self.steps
        run.seconds = max((served.token_times[-1] for served in run.requests), default=0.0)
        run.num_steps = len(steps)
        run.num_computed_tokens = sum(n for step in steps for n, _ in step.items)
        run.kv_use /= (run.busy_seconds or 1) * len(self.llm.block_manager.blocks)
        for name, count in counters(self.llm).items():
            setattr(run, name, count - self.before[name])
        return run


def num_rows(schedule: Schedule) -> int:
    """That drew a token. Of guesses, only those that were right are still in the schedule."""
    num_draft_tokens = sum(seq.place for seq, _, _ in schedule.items if isinstance(seq, Draft))
    return num_draft_tokens + sum(not isinstance(row, Draft) for row in schedule.sampled)


def counters(llm: LLM) -> dict[str, int]:
    """What the scheduler counts, by the names in `Run`."""
    names = ("num_prompt_tokens", "num_cached_tokens", "num_preemptions", "num_swapped_blocks")
    return {name: getattr(llm.scheduler, name) for name in names}


class KnownProposer(JobProposer):
    """Guesses in a real engine as often, and as rightly, as `Job.right_draft_tokens` says."""

    def __init__(self, llm: LLM, jobs: Sequence[Job]):
        """Needs all answers beforehand: the engine, which makes no guesses yet, gives them here."""
        assert all(job.after is None for job in jobs), "what follows an answer is not known"
        served = {str(i): Served(job) for i, job in enumerate(jobs)}
        super().__init__({}, served)
        self.vocab_size = llm.runner.vocab_size
        prompts = [token_ids(job.prompt, self.vocab_size) for job in jobs]
        outputs = llm.generate(prompts, [*map(params_of, jobs)], use_tqdm=False)
        said = [output.outputs[0].token_ids for output in outputs]
        self.said = dict(zip(served, said))

    def propose(self, seq: Seq, most: int) -> list[int]:
        answer = self.said[seq.request.request_id][seq.num_output_tokens :]
        guesses = super().propose(seq, most)
        return [
            (token + 1) % self.vocab_size if guess == WRONG else token
            for token, guess in zip(answer, guesses)
        ]


class Recording(Machine):
    """A machine for one simulation, on which the k-th step takes as long as it was recorded.

    Another step than the recorded one is refused: it is not known how long it would have taken. So
    this is for checking that a scheduler still does the same, not for comparing schedulers.
    """

    def __init__(self, steps: list[Step]):
        super().__init__(Hardware("recorded", 1.0, 1.0, 0.0))
        self.steps = steps
        self.num_replayed = 0

    def seconds(self, shape: Shape, items: Items, num_sampled: int, **moves: int) -> float:
        k = self.num_replayed
        self.num_replayed += 1
        planned = describe(items, num_sampled)
        if k >= len(self.steps):
            there = f"the recording has {len(self.steps)} steps"
            raise ValueError(f"step {k} was not recorded, {there}: {planned}")
        recorded = describe(*self.steps[k][:2])
        if planned != recorded:
            raise ValueError(f"step {k} is another one: planned {planned}, recorded {recorded}")
        return self.steps[k].seconds


def describe(items: Items, num_sampled: int) -> str:
    pairs = [tuple(item) for item in items]
    return f"{pairs} (tokens, context of each sequence), {num_sampled} sampled"
