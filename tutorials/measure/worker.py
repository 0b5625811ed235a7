"""One engine in a process of its own, with the Python of its own environment: -m
tutorials.measure.worker FD.

FD is a socket that carries a line of JSON in each direction in turn. The first line is a Job, and
its answer what the engine told of itself. Each later line is the name of a method of `Measured` with
its arguments, and is answered with what the method returns. While no line comes, the process waits
in a read. An answer {"error": why} is the last one. See `turns` for the other side.
"""

import json
import socket
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path

from tutorials.machine import installed, this_machine
from tutorials.measure.engines import Job, Nanovllm
from tutorials.measure.peers import ENGINES
from tutorials.simulation.requests import Request, shifted


class Measured:
    """An engine that has answered a first tiny request, and what may be asked of it."""

    def __init__(self, job: Job):
        self.job = job
        self.engine = ENGINES[job.engine](job)
        self.wake()
        self.startup_seconds = time.time() - job.started

    def facts(self) -> dict:
        names = ("torch", "triton", "transformers")
        return {
            "version": installed(*self.engine.packages),
            "versions": {name: installed(name) for name in names},
            "startup_seconds": self.startup_seconds,
        }

    def wake(self) -> dict:
        """A tiny request, outside of any time that counts."""
        self.engine.run([Request(self.job.requests[0].prompt[:4], 2)])
        return {}

    def round(self, number: int, count: int | None = None) -> dict:
        """Seconds and answers of a round, with the first `count` requests, or all. No prefix cache
        knows its prompts from another round."""
        requests = shifted(self.job.requests[:count], number, self.job.vocab_size)
        start = time.perf_counter()
        answers = self.engine.run(requests)
        seconds = time.perf_counter() - start
        for answer, request in zip(answers, requests):
            if len(answer.token_ids) != request.max_tokens:
                raise RuntimeError("a request did not get as many tokens as it asked for")
        return {"seconds": seconds, "answers": answers}

    def close(self) -> None:
        if hasattr(self.engine, "close"):
            self.engine.close()


class MeasuredOurs(Measured):
    """Our own engine, which also tells what the peers follow and what its steps were."""

    def __init__(self, job: Job):
        self.before = ceilings_of_a_gpu(job)
        super().__init__(job)
        self.runner = self.engine.llm.runner
        self.before = self.before or self.ceilings()

    def facts(self) -> dict:
        import torch

        llm = self.engine.llm
        num_tokens = len(llm.block_manager.blocks) * llm.config.block_size
        return super().facts() | {
            "dtype": str(self.runner.dtype).removeprefix("torch."),
            "device": str(self.runner.device),
            "device_name": self.before.name,
            "threads": self.engine.threads,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "batch_tokens": llm.limits.max_num_batched_tokens,
            "kv_tokens": num_tokens,
            "kv_bytes": num_tokens * self.shape().kv_bytes,
        }

    def observe(self, number: int) -> dict:
        """One more round, with every step timed: its roofline, and what its requests did to the
        cache. The ceilings of a CPU are the better of two measurements, before and after all rounds."""
        from nanovllm.topics.simulator.cost_model import Hardware
        from tutorials.measure.steps import roofline

        self.engine.observe()
        before = self.engine.stats()
        seconds = self.round(number)["seconds"]
        after = self.engine.stats()
        hardware = self.before
        if self.runner.device.type == "cpu":
            hardware = Hardware(*map(max, zip(hardware, self.ceilings())))
        return {
            "observed_seconds": seconds,
            "cache": {k: n if k.startswith("kv") else n - before[k] for k, n in after.items()},
            "ceilings": hardware._asdict(),
            "roofline": roofline(self.shape(), self.engine.steps, hardware),
        }

    def shape(self):
        from nanovllm.topics.simulator.cost_model import shape_of

        config = json.loads((Path(self.job.model) / "config.json").read_bytes())
        return shape_of(config, self.runner.dtype.itemsize)

    def ceilings(self):
        return this_machine(self.runner.device, self.runner.dtype, self.engine.threads)


def ceilings_of_a_gpu(job: Job):
    """What it can do at most, measured before the KV cache takes its memory; it does not count as
    start-up."""
    import torch

    if not torch.cuda.is_available() or job.options.get("device") == "cpu":
        return None
    start = time.time()
    hardware = this_machine(torch.device("cuda"), torch.bfloat16)
    torch.cuda.empty_cache()
    job.started += time.time() - start
    return hardware


def serve(lines, tell) -> None:
    """Answers line by line, until there are no more."""
    job = Job(**json.loads(next(lines)))
    cls = ENGINES[job.engine]
    is_ours = cls is Nanovllm
    is_here = installed(*cls.packages) is not None or find_spec(cls.module) is not None
    if not is_here:  # nor in a folder of PYTHONPATH
        tell({"error": "not installed"})
        return
    engine = MeasuredOurs(job) if is_ours else Measured(job)
    tell(engine.facts())
    for line in lines:
        name, *arguments = json.loads(line)
        tell(getattr(engine, name)(*arguments))
    engine.close()


def main(fd: str) -> None:
    with socket.socket(fileno=int(fd)) as connection, connection.makefile("rw") as pipe:
        connection.set_inheritable(False)  # what the engine starts has no part in it

        def tell(answer: dict) -> None:
            print(json.dumps(answer), file=pipe, flush=True)

        try:
            serve(pipe, tell)
        except Exception as error:
            traceback.print_exc()
            last_line = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
            tell({"error": last_line})


if __name__ == "__main__":
    main(*sys.argv[1:])
