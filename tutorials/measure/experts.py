"""Measures a model with experts: Qwen3-30B-A3B's shape with a quarter of its layers, and made-up weights in 4 bits.

Run: python -m tutorials.measure.experts experts.json    on a quiet machine, 10 GB of memory, three minutes
"""

import json
import random
import resource
import sys
import time
from copy import deepcopy
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from nanovllm import LLM, SamplingParams, model_runner
from nanovllm.layers.experts import Stack
from nanovllm.layers.linear import Linear
from nanovllm.loader import new_model
from nanovllm.models.experts import Router
from nanovllm.topics.simulator.cost_model import SHAPES, shape_of
from tutorials.machine import device_name, environment, seconds_of

SHAPE = SHAPES["qwen3-30b-a3b"] | {"num_hidden_layers": 12}
CPU = torch.device("cpu")
REQUESTS = (1, 2, 4, 8, 16, 32, 64)
STEPS = 12  # decodes that are timed
PROMPT = 8  # tokens


def made_up(path, config, max_model_len, dtype, device, ops, prepare):
    """In place of load_model: random numbers, which repeat after 16 million, at another place in each expert. The first
    layer is quantized, one matrix after the other; the other layers get copies of it, and routers of their own."""
    model = new_model(config, max_model_len, dtype, device, ops)
    numbers = torch.randn(2**24 + 1) * 0.02
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    for module in [*model.modules()]:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or module in linears:
            continue
        if weight.is_meta:
            module.to_empty(device=device)
        fill(module.weight, numbers) if weight.dim() > 1 else module.weight.fill_(1)
    firsts: dict[tuple, Linear] = {}
    for module in linears:
        kind = type(module), *module.weight.shape
        if kind in firsts and not isinstance(module, Router):
            module.product = deepcopy(firsts[kind].product)
            continue
        module.to_empty(device=device)
        fill(module.weight, numbers if not isinstance(module, Router) else torch.randn(2**18) / 50)
        if module is model.lm_head:
            module.is_head = True  # type: ignore[assignment]
        prepare(module)
        firsts[kind] = module
    return model.eval()


def fill(weight: Tensor, numbers: Tensor) -> None:
    flat = weight.view(-1)
    for first in range(0, len(flat), len(numbers)):
        part = flat[first : first + len(numbers)]
        part.copy_(numbers[: len(part)])


class Choices:
    """What routers have chosen: for each layer, the experts of each token of the steps that are watched."""

    def __init__(self, model: nn.Module):
        self.found: list[Tensor] = []
        self.is_watching = False
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(self.keep)

    def keep(self, router: Router, args: tuple, output: tuple) -> None:
        if self.is_watching:
            self.found.append(output[1])

    def num_hit(self) -> float:
        """Experts that a step hits in a layer, on average."""
        return sum(len(chosen.unique()) for chosen in self.found) / len(self.found)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def reading_rate() -> float:
    """Bytes per second of the best of ten sums over a GiB, which no cache holds."""
    numbers = torch.ones(2**28)
    return numbers.nbytes / min(seconds_of(numbers.sum, CPU) for _ in range(10))


def bytes_of(module: Linear) -> float:
    """That a product reads: 4 bits and, for each group of 128, a scale and a zero; the head has 8 bits, a router 32."""
    count = module.weight.numel()
    if isinstance(module, Router):
        return 4 * count
    return count if hasattr(module, "is_head") else count / 2 + count / 128 * 5


def measure(num_layers: int) -> dict:
    config = AutoConfig.for_model(**SHAPE | {"num_hidden_layers": num_layers})
    begin = time.perf_counter()
    with TemporaryDirectory() as folder, mock.patch.object(model_runner, "load_model", made_up):
        config.save_pretrained(folder)
        llm = LLM(folder, dtype="float32", quantization="int4", num_blocks=140, max_model_len=64)
    model = llm.runner.model
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    of_experts = sum(bytes_of(one) for one in linears if isinstance(one, Stack))
    rest = sum(bytes_of(one) for one in linears if not isinstance(one, Stack))
    bytes_per_second = reading_rate()
    shape = shape_of(config, 4)
    result = {
        "layers": num_layers,
        "parameters": shape.body + 2 * shape.head,
        "load_seconds": round(time.perf_counter() - begin, 1),
        "resident_gb": round(resident_bytes() / 1e9, 2),
        "largest_resident_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "expert_gb": round(of_experts / 1e9, 3),
        "other_weights_gb": round(rest / 1e9, 3),
        "read_gb_per_second": round(bytes_per_second / 1e9, 1),
        "requests": {},
    }
    choices = Choices(model)
    for count in REQUESTS:
        rng = random.Random(count)
        prompts = [[rng.randrange(config.vocab_size) for _ in range(PROMPT)] for _ in range(count)]
        steps: list[float] = []
        choices.found.clear()

        def watch(schedule, seconds, count=count, steps=steps) -> None:
            """Called after each step; the next one is watched if all prompts are computed."""
            if choices.is_watching:
                steps.append(seconds)
            choices.is_watching = len(llm.scheduler.running) == count

        llm.observers.append(watch)
        params = SamplingParams(max_tokens=STEPS + 1, ignore_eos=True, seed=count)
        llm.generate(prompts, params, use_tqdm=False)
        llm.observers.remove(watch)
        choices.is_watching = False
        hit = choices.num_hit()
        read = rest + of_experts * hit / shape.experts
        floor = read / bytes_per_second
        result["requests"][str(count)] = {
            "tokens_per_second": round(count / median(steps), 2),
            "step_ms": round(1e3 * median(steps), 1),
            "steps_ms": [round(1e3 * seconds, 1) for seconds in steps],
            "experts_hit": round(hit, 1),
            "experts_hit_if_uniform": round(shape.hit(count), 1),
            "read_gb": round(read / 1e9, 3),
            "floor_ms": round(1e3 * floor, 1),
            "floor_share": round(floor / median(steps), 3),
        }
    return result | environment() | {"device": device_name(CPU)}


if __name__ == "__main__":
    file, *layers = sys.argv[1:]
    found = measure(int(layers[0]) if layers else SHAPE["num_hidden_layers"])
    Path(file).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in found.items() if key != "requests"}))
    for count, row in found["requests"].items():
        print(count, row)
