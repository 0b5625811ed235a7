"""A decode against the length of its context: a model with states in six of eight layers, and one
with attention in all eight. Their weights are made up, and their sizes the same.

    python -m tutorials.measure.hybrid tutorials/results/cpu_hybrid.json
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Request
from tutorials.machine import device_name, environment
from tutorials.report import write_json

SIZES = dict(
    vocab_size=512,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=32_768,
    eos_token_id=None,
)
STATES = dict(
    linear_num_key_heads=8,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
CONTEXTS = [500, 1000, 2000, 4000, 8000, 16_000, 32_000]


def engine(model) -> LLM:
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    options = dict(dtype="float32", max_num_seqs=2, num_blocks=2000)
    llm = LLM(folder, attention_backend="numba", **options)
    llm.runner.kv_cache.tensor.normal_()  # pages that nobody has written are one page of zeros
    return llm


def decode(llm: LLM, context: int, repeat: int) -> list[float]:
    """Seconds of steps that compute the last token of a sequence with this context."""
    request = Request("", None, [1] * context, SamplingParams(temperature=0))
    (seq,) = request.sequences
    seq.block_table = [*range(-(-context // 16))]
    seq.state_slot = 1
    seconds = []
    for _ in range(repeat):
        schedule = Schedule()
        schedule.add(Item(seq, context - 1, 1))
        start = time.perf_counter()
        llm.runner.launch(schedule)()
        seconds.append(time.perf_counter() - start)
    return seconds


def main(path: Path) -> None:
    hybrid = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **STATES))
    engines = {
        "attention": engine(Qwen3ForCausalLM(Qwen3Config(**SIZES))),
        "hybrid": engine(hybrid),
    }
    report: dict = environment() | {"device": device_name(torch.device("cpu"))}
    report["seconds"] = {name: {} for name in engines}
    for context in CONTEXTS:
        rounds: dict[str, list] = {name: [] for name in engines}
        for _ in range(7):
            for name, llm in engines.items():  # in turns
                rounds[name].append(median(decode(llm, context, 9)))
        for name in engines:
            report["seconds"][name][context] = median(rounds[name])
    for name, llm in engines.items():
        runner = llm.runner
        report.setdefault("token_bytes", {})[name] = runner.shape.block_bytes // 16
    report["state_bytes"] = engines["hybrid"].runner.model.states.nbytes // 3
    write_json(report, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
