"""Random lives of an engine, with the fake model: requests of all kinds come and go while memory is scarce, hooks and
steps fail, and Ctrl-C comes at any time. Each answer must be the one that its request gets alone, or the error of a
fault; and in the end nothing is left.

Tests import this file; for more of them: STEPS=500000 pytest tests/core/test_ctrl_c.py --slow -k lives
"""

import random
import signal
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from fake_engine import Boom, check_clean
from fake_model import FakeRunner, Oracle

import nanovllm
from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler
from nanovllm.topics.checks.schedules import ScheduleChecks

PACKAGE = str(Path(nanovllm.__file__).parent)
BLOCK_SIZE, VOCAB_SIZE, MAX_LEN = 4, 1536, 90
ARMED: list[bool] = []  # while a Ctrl-C may come
FAULTS = ("launch", "collect", "update", "plan", "enqueue", "allocate", "finish")


class Runner(FakeRunner):
    """A device that may compute behind the host."""

    fault = ""

    def launch(self, schedule):
        fail_if(self.fault == "launch")
        collect = super().launch(schedule)
        fails = self.fault == "collect"

        def collected():
            fail_if(fails)
            return collect()

        return collected


class Fragile(Scheduler):
    fault = ""

    def update(self, schedule, *drawn):
        super().update(schedule, *drawn)
        fail_if(self.fault == "update")

    def tokens_to_compute(self, request, schedule):
        items = super().tokens_to_compute(request, schedule)
        fail_if(self.fault == "plan")
        return items

    def enqueue(self, request):
        super().enqueue(request)
        fail_if(self.fault == "enqueue")

    def finish(self, seq, reason):
        super().finish(seq, reason)
        fail_if(self.fault == "finish")


class ShortestFirst(Fragile):
    def priority(self, request):
        return len(request.prompt_token_ids), request.arrival


class FragileBlocks(BlockManager):
    fault = ""

    def allocate(self, seq, num_tokens):
        super().allocate(seq, num_tokens)
        fail_if(self.fault == "allocate")


def fail_if(is_fault: bool) -> None:
    if is_fault:
        raise Boom


def new_llm(scheduler_cls=Fragile, num_blocks=2000, num_host_blocks=0, **options) -> LLM:
    mode = "swap" if num_host_blocks else "recompute"
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "preemption_mode": mode} | options
    classes = {"scheduler_cls": scheduler_cls, "block_manager_cls": FragileBlocks}
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_model_len": MAX_LEN}
    runner = Runner(BLOCK_SIZE, VOCAB_SIZE, num_blocks, num_host_blocks)
    return LLM(runner=runner, **classes, **sizes, **options)


def random_request(rng: random.Random) -> tuple:
    """A prompt, often with the start of others, and parameters."""
    stem = tuple(range(300, 300 + rng.choice([0, 3, 8, 21])))
    prompt = stem + tuple(rng.randrange(6) for _ in range(rng.choice([1, 2, 9, 30])))
    if rng.random() < 0.03:
        return prompt, BeamSearchParams(beam_width=rng.randint(1, 3), max_tokens=rng.randint(1, 9))
    options = {
        "n": rng.choice([1, 1, 1, 2, 3]),
        "seed": rng.randrange(40),
        "temperature": rng.choice([0, 1]),
        "max_tokens": rng.randint(1, 25),
        "ignore_eos": rng.random() < 0.8,
        "logprobs": rng.choice([None] * 19 + [2]),
        "cache_salt": rng.choice([None, None, None, "a"]),
    }
    if rng.random() < 0.3:
        options["stop"] = rng.sample(["a", "e", "th", "\n", " "], 2)
        options["min_tokens"] = min(options["max_tokens"], rng.randint(0, 4))
    return prompt, SamplingParams(**options)


@cache
def alone() -> LLM:
    return new_llm(enable_prefix_caching=False)


def answer(output) -> list:
    return [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in output.outputs]


class Life:
    """An engine, what it was asked, and what it has answered."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        num_blocks = rng.choice([36, 40, 60, 400])
        num_host_blocks = rng.choice([0, 20, 60])
        self.llm = new_llm(
            rng.choice([Fragile, ShortestFirst]),
            num_blocks,
            num_host_blocks,
            swap_prefixes=num_host_blocks > 0 and rng.random() < 0.5,
            max_num_seqs=rng.choice([4, 7, 16]),
            max_num_batched_tokens=rng.choice([16, 40, 200]),
            enable_prefix_caching=rng.random() < 0.7,
        )
        if rng.random() < 0.4:  # two steps in flight: the faulty classes do as the engine's own
            self.llm.planner, self.llm.overlaps = self.llm.scheduler, True
        elif rng.random() < 0.7:
            self.llm.scheduler.proposer = Oracle(
                rng, VOCAB_SIZE, right=rng.choice([1, 0.8, 0.8, 0])
            )
        self.asked: dict[str, tuple] = {}
        self.outputs: dict = {}
        self.counts: Counter[str] = Counter()
        self.may_abort: set[str] = set()
        self.has_faults = rng.random() < 0.7

    def live(self, num_requests: int) -> None:
        left = num_requests
        while left or self.llm.has_unfinished():
            if left and self.rng.random() < 0.3:
                left -= 1
                self.insist(self.ask)
            if self.asked and self.rng.random() < 0.01:
                self.insist(self.abort)
            if self.has_faults and self.rng.random() < 0.05:
                self.set_fault(self.rng.choice(FAULTS))
            self.insist(self.step)
            self.set_fault("")
        for name, output in self.outputs.items():
            self.insist(lambda output=output: answer(output))
            self.check(name, output)
        self.set_fault("")
        self.counts["from the host"] += self.llm.stats()["host_cache_hit_tokens"]
        self.counts["wasted"] += self.llm.stats()["wasted_tokens"]
        check_clean(self.llm)
        assert self.llm.overlaps or isinstance(self.llm.planner, ScheduleChecks)

    def ask(self) -> None:
        name = f"request {len(self.asked)}"
        prompt, params = random_request(self.rng)
        self.asked[name] = prompt, params
        if self.llm.inputs.request(list(prompt), params) and name not in self.llm.requests:
            self.llm.add_request(list(prompt), params, name, priority=self.rng.randrange(2))

    def abort(self) -> None:
        name = self.rng.choice([*self.asked])
        self.may_abort.add(name)
        self.llm.abort(name)

    def set_fault(self, place: str) -> None:
        self.counts["faults"] += bool(place)
        for owner in (self.llm.runner, self.llm.scheduler, self.llm.block_manager):
            owner.fault = place

    def step(self) -> None:
        self.counts["steps"] += 1
        for output in self.llm.step():
            self.outputs[output.request_id] = output

    def insist(self, action) -> None:
        """Only in here, a Ctrl-C may come."""
        try:
            ARMED.append(True)
            action()
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
        finally:
            ARMED.clear()

    def check(self, name: str, output) -> None:
        self.counts["answers"] += 1
        reasons = {one.finish_reason for one in output.outputs}
        if output.error is not None:
            assert isinstance(output.error, Boom) and self.has_faults, repr(output.error)
            self.counts["errors"] += 1
        elif "abort" in reasons:
            assert name in self.may_abort
        else:
            prompt, params = self.asked[name]
            (expected,) = alone().generate([list(prompt)], params, use_tqdm=False)
            assert answer(output) == answer(expected), (name, prompt, params)
            self.counts["right"] += 1


def interrupt(_, frame) -> None:
    """As a Ctrl-C in the engine; in this program itself it would prove nothing."""
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.05))
    while ARMED and frame is not None:
        if "_pytest" in frame.f_code.co_filename:  # its hook, called from anywhere
            return
        if frame.f_code.co_filename.startswith(PACKAGE):
            raise KeyboardInterrupt
        frame = frame.f_back


def run(steps: int, seed: int) -> Counter:
    """Lives until so many steps are done. Half of them are interrupted."""
    counts: Counter[str] = Counter()
    before = signal.signal(signal.SIGALRM, interrupt)
    while counts["steps"] < steps:
        life = Life(seed)
        if seed % 2:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            life.live(num_requests=40)
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        proposer = life.llm.scheduler.proposer
        if proposer is not None:
            life.counts["draft_tokens"] += proposer.num_draft_tokens
            life.counts["accepted"] += proposer.num_accepted.total()
        counts += life.counts
        seed += 1
    signal.signal(signal.SIGALRM, before)
    return counts
