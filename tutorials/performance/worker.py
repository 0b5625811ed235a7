"""One engine in a process of its own, with the Python of its own environment: -m
tutorials.performance.worker JOB RESULT.

JOB and RESULT are JSON files; `run_engine` writes the one, starts the process and reads the other.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from tutorials.performance.engines import ENGINES, Job, Nanovllm
from tutorials.performance.machine import ROOT, installed, this_machine
from tutorials.performance.workloads import Request, shifted


def run_engine(python: str, job: Job) -> dict:
    """What `measure` returns in a new process of the interpreter `python`, or {"error": why there
    is nothing}."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        job_file = Path(folder) / "job.json"
        result_file = Path(folder) / "result.json"
        log = Path(folder) / "log"
        job_file.write_text(json.dumps(asdict(job) | {"started": time.time()}))
        command = [python, "-m", "tutorials.performance.worker", str(job_file), str(result_file)]
        with log.open("w") as out:
            status = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, env=env).returncode
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if result_file.exists():
            result = json.loads(result_file.read_text())
        else:
            result = {"error": lines[-1] if lines else f"exit status {status}"}
    if result.get("error") not in (None, "not installed"):
        print(*lines[-100:], sep="\n", file=sys.stderr)
    return result


def measure(job: Job) -> dict:
    """The engine's start-up in seconds, from the start of the process; a warm-up; and the runs."""
    cls = ENGINES[job.engine]
    is_ours = cls is Nanovllm
    found = installed(*cls.packages)
    if found is None and not is_ours:  # ours runs from its directory, too
        return {"error": "not installed"}
    before = ceilings_of_a_gpu(job) if is_ours else None
    engine = cls(job)
    engine.run([Request(job.requests[0].prompt[:4], 2)])
    result = {"version": found, "startup_seconds": time.time() - job.started}
    result["versions"] = {name: installed(name) for name in ("torch", "triton", "transformers")}
    watch = Watch(engine, job, before) if is_ours else None
    warm_up(engine, job)
    result["runs"] = [one_run(engine, job, i, watch) for i in range(job.repeat)]
    if watch:
        result |= watch.facts(result["runs"])
    if hasattr(engine, "close"):
        engine.close()
    return result


def warm_up(engine, job: Job) -> None:
    """With a few short requests, none of which the runs have."""
    few = [r._replace(max_tokens=min(r.max_tokens, 8), arrival=0.0) for r in job.requests[:8]]
    engine.run(shifted(few, job.repeat, job.vocab_size))


def one_run(engine, job: Job, i: int, watch: "Watch | None") -> dict:
    """Seconds and answers of the i-th run, and what its requests did to our cache."""
    requests = shifted(job.requests, i, job.vocab_size)
    if watch:
        watch.begin()
    start = time.perf_counter()
    answers = engine.run(requests)
    run = {"seconds": time.perf_counter() - start, "answers": answers}
    if watch:
        run["stats"] = watch.end()
    for answer, request in zip(answers, requests):
        if len(answer.token_ids) != request.max_tokens:
            raise RuntimeError("a request did not get as many tokens as it asked for")
    return run


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


class Watch:
    """What we can tell about our own engine only: how much memory it took, and what its steps
    were."""

    def __init__(self, engine: Nanovllm, job: Job, before):
        from nanovllm.roofline import shape_of

        self.engine = engine
        self.runner = engine.llm.runner
        self.all_steps: list[list] = []
        config = json.loads((Path(job.model) / "config.json").read_text())
        self.shape = shape_of(config, self.runner.dtype.itemsize)
        self.before_runs = before or self.ceilings()

    def ceilings(self):
        return this_machine(self.runner.device, self.runner.dtype, self.engine.threads)

    def begin(self) -> None:
        """A run begins."""
        self.before = self.engine.stats()
        self.engine.steps.clear()

    def end(self) -> dict:
        """A run has ended: what its requests did to the cache."""
        self.all_steps.append(self.engine.steps.copy())
        return {
            name: n if name.startswith("kv") else n - self.before[name]
            for name, n in self.engine.stats().items()
        }

    def facts(self, runs: list[dict]) -> dict:
        """What the peers follow, and the ceilings, on a CPU the better of those before and after.
        Adds to each run."""
        from nanovllm.roofline import Hardware
        from tutorials.performance.steps import binned, roofline

        hardware = self.before_runs
        if self.runner.device.type == "cpu":
            hardware = Hardware(*map(max, zip(hardware, self.ceilings())))
        for run, steps in zip(runs, self.all_steps):
            run["roofline"] = roofline(self.shape, steps, hardware)
            run["steps"] = binned(self.shape, steps)
        llm = self.engine.llm
        num_tokens = len(llm.block_manager.blocks) * llm.config.block_size
        return {
            "dtype": str(self.runner.dtype).removeprefix("torch."),
            "device": str(self.runner.device),
            "device_name": hardware.name,
            "batch_tokens": llm.limits.max_num_batched_tokens,
            "kv_tokens": num_tokens,
            "kv_bytes": num_tokens * self.shape.kv_bytes,
            "ceilings": hardware._asdict(),
        }


def main(job_file: str, result_file: str) -> None:
    job = Job(**json.loads(Path(job_file).read_text()))
    try:
        result = measure(job)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[-1]}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
