"""Does a draft model pay? Measures its decodes, a decode, and the check of a draft, and compares the
formula of chapter 22 with the engine at both ends: drafts that are always right, and noise.

    python -m tutorials.measure.drafts noise ~/.cache/nanovllm tutorials/results/cpu_drafts.json
    python -m tutorials.measure.drafts itself ~/.cache/nanovllm tutorials/results/cpu_drafts.json

Each adds its runs to the file. The weights are random: Qwen3-0.6B's shape, and SmolLM2-135M's
layers with Qwen3's vocabulary.
"""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from nanovllm import LLM, SamplingParams
from nanovllm.topics.simulator.cost_model import SHAPES
from tutorials.machine import device_name, environment
from tutorials.measure.checkpoints import random_model

TARGET, DRAFT = "qwen3-0.6b", "smollm2-qwen3"
SIZES = (1, 2, 4, 8)
ROUNDS = 3
OUTPUTS = {"noise": 17, "itself": 41}  # tokens of an answer


class Timed:
    """An engine whose launches are timed: by the model, and its tokens in the step."""

    def __init__(self, model: Path, draft: Path):
        drafts = {"model": str(draft), "num_speculative_tokens": 4}
        limits = dict(max_model_len=512, kv_cache_gib=0.5, enable_prefix_caching=False)
        self.llm = LLM(str(model), speculative_config=drafts, **limits)
        self.proposer = self.llm.scheduler.proposer
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        runner = self.llm.runner
        for name, one in {"target": runner, "draft": runner.draft}.items():
            one.launch = self.timed(name, one.launch)

    def timed(self, name, launch):
        def timed_launch(schedule):
            start = time.perf_counter()
            result = launch(schedule)()
            self.seconds[name, schedule.num_tokens].append(time.perf_counter() - start)
            return lambda: result

        return timed_launch

    def run(self, k: int, num_outputs: int) -> dict:
        """One request with k draft tokens in each step; with 0, without the draft model. Returns
        the tokens and the seconds of all steps with a whole draft, and the median of each launch."""
        self.proposer.config.num_speculative_tokens = k
        self.llm.scheduler.proposer = self.proposer if k else None
        self.seconds.clear()
        steps: list[tuple[int, float]] = []

        def observe(plan, seconds):
            if plan.num_tokens == 1 + k:
                steps.append((len(plan.sampled), seconds))

        self.llm.observers = [observe]
        params = SamplingParams(temperature=0, max_tokens=num_outputs, ignore_eos=True)
        self.llm.generate([[5, 6, 7] * 8], params, use_tqdm=False)
        tokens, seconds = map(sum, zip(*steps))
        times = {f"{name}_{n}": median(each) for (name, n), each in self.seconds.items()}
        return {"k": k, "tokens": tokens, "steps": len(steps), "seconds": seconds, **times}


def main() -> None:
    name, *paths = sys.argv[1:]
    weights, file = map(Path, paths)
    SHAPES[DRAFT] = SHAPES["smollm2-135m"] | {"vocab_size": SHAPES[TARGET]["vocab_size"]}
    target, noise = (random_model(shape, weights) for shape in (TARGET, DRAFT))
    engine = Timed(target, noise if name == "noise" else target)
    sizes = SIZES if name == "noise" else (4,)
    for k in (0, 4):  # warms up
        engine.run(k, OUTPUTS[name])
    runs = [engine.run(k, OUTPUTS[name]) for _ in range(ROUNDS) for k in (0, *sizes)]
    device = device_name(engine.llm.runner.device)
    report = environment() | {"device": device, "target": SHAPES[TARGET], "draft": SHAPES[DRAFT]}
    if file.is_file():
        report = json.loads(file.read_bytes())
    report[name] = runs
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
