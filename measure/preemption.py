"""`bench.py preemption`: seconds that it costs a request until its next token, by swap and by
recompute."""

import random
import time

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.swapping.blocks import free_host
from tutorials.machine import device_name, environment, installed
from tutorials.performance.checkpoints import model_directory
from tutorials.report import percentile, table


def measure(args) -> dict:
    """`bench.py preemption`: prints a line for each block size and context, and returns the
    report."""
    path, rows, report, threads = model_directory(args), [], environment(), torch.get_num_threads()
    for block_size in (1, 4, 16, 64, 256):
        options = dict(dtype=args.dtype, max_model_len=args.max_model_len, max_num_seqs=1) | dict(
            args.option
        )
        options |= dict(block_size=block_size, preemption_mode="swap", enable_prefix_caching=False)
        llm = LLM(str(path), **options)
        for context in (250, 1000, 4000, 16000):
            if context + 16 <= min(llm.limits.max_model_len, llm.runner.num_blocks * block_size):
                swaps = [recovery(llm, context, swap=True) for _ in range(args.repeat)]
                recomputes = [recovery(llm, context, swap=False) for _ in range(args.repeat)]
                rows.append({
                    "block_size": block_size,
                    "context": context,
                    "megabytes": context * llm.runner.shape.block_bytes / block_size / 1e6,
                    "swap_out_seconds": percentile([out for out, _ in swaps], 50),
                    "swap_in_seconds": percentile([back for _, back in swaps], 50),
                    "recompute_seconds": percentile([back for _, back in recomputes], 50),
                })  # fmt: skip
    report |= {"device": device_name(llm.runner.device, threads), "model": path.name}
    report |= {"dtype": str(llm.runner.dtype).removeprefix("torch.")}
    report |= {
        "versions": {name: installed(name) for name in ("torch", "triton")},
        "preemption": rows,
    }
    print(
        f"{report['model']}, {report['dtype']}, {report['device']}: milliseconds until the next token\n"
    )
    columns = [("block_size", ""), ("context", ","), ("megabytes", ",.1f")]
    columns += [(f"{name}_seconds", ",.2f", 1e3) for name in ("swap_out", "swap_in", "recompute")]
    header = "|block|context|MB|swap out|swap in|recompute"
    print(table(header, columns, {str(i): row for i, row in enumerate(rows, 1)}))
    return report


def recovery(llm, context: int, swap: bool) -> tuple[float, float]:
    """Seconds (to swap out, to be back where it was) of a request that is preempted and at once
    admitted again."""

    def next_token() -> float:
        before = llm.counts.output_tokens
        start = time.perf_counter()
        while llm.counts.output_tokens == before:  # it ends with the token on the host
            llm.step()
        return time.perf_counter() - start

    rng = random.Random(0)
    prompt = [rng.randrange(llm.runner.vocab_size) for _ in range(context)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    request_id = llm.add_request(prompt, params)
    next_token()
    ordinary = percentile([next_token() for _ in range(5)], 50)
    (request,) = llm.scheduler.running
    llm.scheduler.preempt(request)
    moves = llm.block_manager.take_moves()
    out = 0.0
    if swap:
        start = time.perf_counter()
        llm.runner.move_blocks(moves)
        if llm.runner.device.type == "cuda":
            torch.cuda.synchronize()  # a step that follows need not wait so long
        out = time.perf_counter() - start
    else:
        free_host(llm.block_manager, request.sequences[0])
    back = next_token() - ordinary
    llm.abort(request_id)
    llm.step()
    return out, back
