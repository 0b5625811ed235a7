"""What a benchmark asks of an engine, and ours behind it: `run` takes requests and returns an Answer
for each. The others are in `peers`."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from tutorials.simulation.requests import Request

# Neither torch nor anything of ours up here: a worker imports this file in the environment of any
# engine.


@dataclass
class Job:
    """What one engine is to do in a process of its own. It travels there as JSON."""

    model: str  # a directory
    engine: str = "nanovllm"  # one of `peers.ENGINES`
    requests: list[Request] = field(default_factory=list)
    vocab_size: int = 0
    max_model_len: int | None = None  # None: the longest context that the model supports
    dtype: str = "auto"
    temperature: float = 0.0
    has_rate: bool = False  # requests come over time, so that latency is the question
    options: dict = field(default_factory=dict)  # fields of our Config
    gpu_share: float = 0.9  # of a GPU's memory: the engines are there together
    started: float = 0.0  # when the process was started, in seconds since 1970
    # what the peers follow: how ours is set up
    device: str | None = None
    kv_tokens: int | None = None
    kv_bytes: int | None = None
    batch_tokens: int | None = None
    threads: int | None = None

    def __post_init__(self):
        self.requests = [Request(*request) for request in self.requests]


class Answer(NamedTuple):
    token_ids: list[int]
    ttft: float | None = None  # seconds from arrival to the first token
    tpot: float | None = None  # seconds per token after the first


class Loop:
    """An engine with `add(i, request)` and `step()`, which returns what has finished: (i, token
    ids, time of the first token, time of the last one); the times are None if the engine does not
    tell."""

    def run(self, requests: list[Request]) -> list[Answer]:
        """Hands each request over when it arrives, and steps until all are answered."""
        answers = {}
        waiting = deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival))
        unfinished = 0
        start = time.perf_counter()
        while waiting or unfinished:
            while waiting and start + requests[waiting[0]].arrival <= time.perf_counter():
                self.add(waiting[0], requests[waiting.popleft()])
                unfinished += 1
            if not unfinished:
                time.sleep(max(0.0, start + requests[waiting[0]].arrival - time.perf_counter()))
                continue
            for i, token_ids, first, last in self.step():
                ttft = None if first is None else first - start - requests[i].arrival
                has_tpot = first is not None and len(token_ids) > 1
                tpot = (last - first) / (len(token_ids) - 1) if has_tpot else None
                answers[i] = Answer(token_ids, ttft, tpot)
                unfinished -= 1
        return [answers[i] for i in range(len(requests))]


class Nanovllm(Loop):
    """This repository's engine, as its users run it.

    After `observe`, `steps` has a Step for each that ran. What a step takes beside the model's part
    is the host's: see `timed_runner`.
    """

    packages, module = ("nanovllm",), "nanovllm"
    has_arrivals = True

    def __init__(self, job: Job):
        import torch

        from nanovllm import LLM, SamplingParams

        self.threads = torch.get_num_threads()  # before the engine may choose
        options = {"dtype": job.dtype, "max_model_len": job.max_model_len}
        options["gpu_memory_utilization"] = job.gpu_share
        self.llm = LLM(job.model, **options | job.options)
        self.llm.tokenizer = None  # token ids in, token ids out, as for the peers
        self.params = lambda n: SamplingParams(
            temperature=job.temperature, max_tokens=n, ignore_eos=True
        )
        self.first: dict[str, float] = {}  # of each request: when its first token came
        self.steps: list = []

    def add(self, i: int, request: Request) -> None:
        self.llm.add_request(request.prompt, self.params(request.max_tokens), str(i))

    def step(self):
        outputs = self.llm.step()
        now = time.perf_counter()
        for output in outputs:
            self.first.setdefault(output.request_id, now)
        done = [output for output in outputs if output.finished]
        return [
            (int(o.request_id), o.outputs[0].token_ids, self.first.pop(o.request_id), now)
            for o in done
        ]

    def observe(self) -> None:
        """From now on, steps are observed."""
        from tutorials.measure.timed_runner import time_runner

        time_runner(self.llm)
        self.llm.observers.append(self.note)

    def note(self, schedule, seconds: float) -> None:
        from nanovllm.topics.simulator.replica import items_of
        from tutorials.measure.steps import Step

        host_seconds = seconds - self.llm.runner.model_seconds
        sampled = len(schedule.sampled)
        self.steps.append(Step(items_of(schedule), sampled, seconds, host_seconds))

    def stats(self) -> dict:
        names = ("kv_blocks", "kv_blocks_used_peak", "prefix_cache_hit_tokens", "preemptions")
        return {name: self.llm.stats()[name] for name in names}
