"""bench.py: its workloads, its arithmetic, its weights, and one whole run. Speed is not tested.

Run: pytest tests/tutorials/test_bench.py [-k trace]
"""

import json
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import SHAPE, greedy, new_model, save
from transformers import AutoModelForCausalLM

import bench
from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL
from nanovllm.model_runner import ModelRunner
from tutorials.measure import engines, tables
from tutorials.measure.checkpoints import write_checkpoint
from tutorials.measure.engines import Answer, Job, Loop, Nanovllm
from tutorials.measure.peers import ENGINES
from tutorials.measure.worker import Measured
from tutorials.report import summary
from tutorials.simulation.requests import Request, make_requests

ROOT = Path(__file__).parents[2]


def parse(*argv):
    args = bench.parser().parse_args(argv)
    bench.check(args)
    return args


# --- workloads ---


def test_nano_vllm_workload():
    """Drawn as nano-vllm's bench draws it: all prompts, then all lengths."""
    requests = make_requests(parse("--workload", "nano-vllm"), 151936)
    assert len(requests) == 256
    assert sum(request.max_tokens for request in requests) == 133_966
    rng = random.Random(0)
    length = rng.randint(100, 1024)
    assert requests[0].prompt == [rng.randint(0, 10000) for _ in range(length)]
    assert all(request.arrival == 0 for request in requests)


def test_poisson_arrivals():
    arrivals = [r.arrival for r in make_requests(parse("--requests", "2000", "--rate", "4"), 100)]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    assert arrivals[-1] / 1999 == pytest.approx(1 / 4, rel=0.1)


def test_trace(tmp_path):
    """How it is read is in tests/simulator/test_workloads.py."""
    rows = ["46.6805900,374,44", "50.6805900,396,109", "55.6805900,7,0", "58.6805900,9,9"]
    lines = "".join(f"2023-11-16 18:15:{row}\n" for row in rows)
    trace = tmp_path / "trace.csv"
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{lines}")
    args = parse("--trace", str(trace), "--requests", "3", "--rate", "1")
    requests = make_requests(args, 50)
    assert [len(request.prompt) for request in requests] == [374, 396, 7]
    assert requests[-1].arrival == pytest.approx(2)
    assert args.temperature == 0


# --- random weights ---


@pytest.mark.parametrize("family, tied", [("qwen3", True), ("qwen2", False)])
def test_random_weights(tmp_path, family, tied):
    path = tmp_path / "model"
    head_dim = 16 if family == "qwen3" else 128
    write_checkpoint(
        SHAPE | dict(model_type=family, tie_word_embeddings=tied, head_dim=head_dim), path
    )
    assert not list(tmp_path.glob("*.part"))
    settings = json.loads((path / "config.json").read_bytes())
    assert settings["rope_theta"] == settings.get("rope_parameters", settings)["rope_theta"] == 1e6
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()
    assert all(
        p.std() < 0.03 if p.dim() > 1 else p.unique().tolist() in ([0], [1])
        for p in model.parameters()
    )
    llm = LLM(str(path), dtype="float32")
    prompts = [[3, 1, 4, 1, 5], [9]]
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False
    )
    assert [o.outputs[0].token_ids for o in outputs] == [
        greedy(model, prompt, 8) for prompt in prompts
    ]


# --- engines ---


class Clock:
    """Instead of the module `time`: each look takes a millisecond, and no thread really sleeps."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Clockwork(Loop):
    """Answers one request per step."""

    def __init__(self, clock):
        self.clock = clock
        self.queue, self.order = [], []

    def add(self, i, request):
        self.queue.append((i, request))
        self.order.append(i)

    def step(self):
        i, request = self.queue.pop(0)
        now = self.clock.perf_counter()
        return [(i, [7] * request.max_tokens, now, now + request.max_tokens - 1)]


def test_requests_are_handed_over_when_they_arrive(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(engines, "time", clock)
    engine = Clockwork(clock)
    answers = engine.run([Request([1], 3, 0.05), Request([1], 2), Request([1], 1, 0.02)])
    assert engine.order == [1, 2, 0]
    assert [len(answer.token_ids) for answer in answers] == [3, 2, 1]
    # counted from the arrival, not from the start
    assert all(0 <= answer.ttft < 0.05 for answer in answers)
    assert [answer.tpot for answer in answers] == [pytest.approx(1), pytest.approx(1), None]


def slowly(function):
    def slow(*args, **kwargs):
        time.sleep(0.01)
        return function(*args, **kwargs)

    return slow


HOST = ["scheduler.schedule", "runner.prepare", "scheduler.update"]
MODEL = ["runner.forward", "runner.ops.sample"]


@pytest.mark.parametrize("name", [*HOST, *MODEL])
def test_host_is_what_python_does_outside_of_the_model(name, monkeypatch):
    engine = Nanovllm(new_job(temperature=0.5))
    engine.run([Request([4], 2)])
    engine.observe()
    *path, last = name.split(".")
    owner = engine.llm
    for part in path:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, last, slowly(getattr(owner, last)))
    engine.run([Request([1, 2, 3], 4), Request([5], 2)])
    assert [step.kind for step in engine.steps] == ["prefill", "decode", "decode", "decode"]
    assert [step.sampled for step in engine.steps] == [2, 2, 1, 1]
    assert engine.steps[1].items == [(1, 4), (1, 2)]
    for step in engine.steps:
        assert 0 < step.host_seconds < step.seconds
        assert (step.host_seconds if name in HOST else step.seconds - step.host_seconds) >= 0.01


def test_our_engine_is_plain_until_it_is_observed():
    """Rounds that count run what users run; then the living engine is observed."""
    engine = Nanovllm(new_job())
    requests = [Request([1, 2, 3], 4), Request([5], 2)]
    before = engine.run(requests)
    assert type(engine.llm.runner) is ModelRunner and not engine.llm.observers and not engine.steps
    engine.observe()
    after = engine.run(requests)
    assert [a.token_ids for a in after] == [b.token_ids for b in before]
    assert len(engine.steps) == 4


def new_job(engine: str = "nanovllm", model: str = EMBEDDED_MODEL, **fields) -> Job:
    requests = [Request([1, 2], 3)] * 2
    return Job(model, engine, requests, vocab_size=9, max_model_len=64, **fields)


class Echo:
    """An engine that answers a prompt with itself."""

    def run(self, requests):
        return [Answer(request.prompt, None, None) for request in requests]


def test_a_round_has_prompts_of_its_own():
    """And a request that did not get its tokens is an error."""
    measured = Measured.__new__(Measured)
    measured.engine, measured.job = Echo(), new_job()
    measured.job.requests = [Request([1, 8, 3], 3), Request([7, 7, 7], 3)]
    assert measured.round(0)["answers"][0].token_ids == [1, 8, 3]
    assert measured.round(2)["answers"][0].token_ids == [3, 1, 5]
    measured.job.requests = [Request([1], 3)]
    with pytest.raises(RuntimeError, match="did not get as many tokens"):
        measured.round(0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_llama_cpp_computes_the_same_model(tmp_path, family):
    """Up to float16, each of its tokens is as likely as the likeliest. In 8 bits, too, but less so."""
    for needed in ("gguf", "llama_cpp"):
        pytest.importorskip(needed)
    model = new_model(family, hidden_size=64, intermediate_size=96)
    requests = [Request([3, 1, 4, 1, 5], 6), Request([9], 9), Request([2, 6], 1)]
    job = Job(save(model, tmp_path), requests=requests, threads=2)
    logits = []
    for name in ("llama.cpp", "llama.cpp-q8_0", "llama.cpp-q4_1"):
        engine = ENGINES[name](job)
        answers = engine.run(requests)
        assert [len(a.token_ids) for a in answers] == [6, 9, 1] and engine.run(requests) == answers
        (prompt, *_), (tokens, *_) = requests[0], answers[0]
        with torch.inference_mode():
            right = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        engine.run([Request(prompt, 1)])
        logits.append((torch.from_numpy(engine.logits(4)) - right[0]).std() / right.std())
        if name == "llama.cpp":
            assert (right.max(1).values - right[range(6), tokens]).max() < 0.03 * right.std()
    assert logits[0] < 0.01 and logits[0] < logits[1] < logits[2] < 0.5
    with pytest.raises(ValueError, match="temperature 0.5: llama.cpp runs here with 0 only"):
        ENGINES["llama.cpp"](new_job(temperature=0.5))


@pytest.mark.slow
def test_the_whole_command(tmp_path):
    file = tmp_path / "results" / "out.json"
    options = "--requests 3 --tokens 4 9 --rounds 2 --cold --peer hf nanovllm-original --option num_blocks=64"
    command = [sys.executable, "bench.py", *options.split(), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_bytes())
    assert {"commit", "device", "python", "dtype", "prompt_tokens", "cut_requests"} <= report.keys()
    assert report["requests"] == 3 and report["command"].startswith("python bench.py --requests 3")
    ours, hf = report["engines"]["nanovllm"], report["engines"]["hf"]
    for engine in (ours, hf):
        assert len(engine["seconds"]) == len(
            engine["warmup_seconds"]
        ) == 2 and torch.__version__.startswith(engine["versions"]["torch"])
        speed = report["output_tokens"] / engine["output_tokens_per_second"]
        assert speed == pytest.approx(sum(engine["seconds"]) / 2)
        assert engine["requests_per_second"] > 0 and engine["startup_seconds"] > 0
    assert hf["same_tokens"] == 1 and hf["ttft_p50"] is None
    assert hf["times_as_fast_range"][0] <= hf["times_as_fast"] and "times_as_fast" not in ours
    assert report["num_threads"] >= 1 and report["cpu_capability"]
    assert 0 < ours["ttft_p50"] <= ours["ttft_p99"] and 0 < ours["tpot_p50"] <= ours["tpot_p99"]
    assert ours["kv_blocks"] == 64 and ours["kv_blocks_used_peak"] > 0
    assert ours["preemptions"] == ours["prefix_cache_hit_tokens"] == 0
    roofline = ours["roofline"]
    assert roofline["prefill"]["steps"] == 1 and 0 <= roofline["decode"]["host_share"] < 1
    assert roofline["decode"]["floor_seconds"] > 0 and ours["ceilings"]["bytes_per_second"] > 0
    assert report["engines"]["nanovllm-original"] == {"error": "not installed"}
    assert "nanovllm-original: not installed" in done.stdout and "100.0%" in done.stdout


# --- report ---


def run_of(seconds, *tokens, ttft=None):
    return {"seconds": seconds, "answers": [[t, ttft, None] for t in tokens]}


def result_of(seconds, tokens=((1,), (2,)), warm_up=(8.0, 4.0)) -> dict:
    """What a worker says of an engine: seconds of its rounds, two requests in each."""
    runs = [run_of(s, *tokens, ttft=i) for i, s in enumerate(seconds)]
    return {"version": "1", "warm_up": [run_of(s) for s in warm_up], "runs": runs}


def test_ratios_are_within_a_round():
    """A round in which the whole machine was slow changes speeds and not the ratio."""
    ours = result_of([1.0, 10.0, 2.0])
    theirs = summary(result_of([2.0, 20.0, 5.0]), ours, 100, is_greedy=True)
    assert theirs["times_as_fast"] == 2 and theirs["times_as_fast_range"] == [2, 2.5]
    assert theirs["output_tokens_per_second"] == 20
    assert theirs["output_tokens_per_second_range"] == [5, 50]
    assert theirs["seconds"] == [2, 20, 5] and theirs["warmup_seconds"] == [8, 4]
    assert theirs["ttft_p50"] == 2  # of the median round
    assert theirs["requests_per_second"] == pytest.approx(2 / 5)


def test_share_of_requests_with_the_same_tokens():
    ours = result_of([1.0, 1.0]) | {"runs": [run_of(1.0, [1], [2]), run_of(1.0, [3], [4])]}
    theirs = result_of([1.0]) | {"runs": [run_of(1.0, [1], [9]), run_of(1.0, [3], [4])]}
    assert summary(theirs, ours, 2, is_greedy=True)["same_tokens"] == 0.75
    assert "same_tokens" not in summary(theirs, ours, 2, is_greedy=False)


@contextmanager
def ended_turns(pythons):
    """Ctrl-C comes in the third round."""
    facts = dict.fromkeys([*bench.FOLLOWED, "device_name", "cpu_capability"], "some")
    result = result_of([]) | facts

    def play(*args):
        for seconds in (2.0, 4.0):
            result["runs"].append(run_of(seconds, [1], ttft=seconds))
            yield
        raise KeyboardInterrupt

    turns = SimpleNamespace(play=play, start=lambda job: facts, foreign_shares=[0.0])
    turns.results = lambda: {"nanovllm": result}
    yield turns


def test_a_benchmark_that_is_ended_keeps_its_rounds(monkeypatch, tmp_path, capsys):
    """Its last round is not observed."""
    file = tmp_path / "out.json"
    monkeypatch.setattr(bench, "Turns", ended_turns)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--cold", "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    report = json.loads(file.read_bytes())
    assert ended.value.code == 1 and report["rounds"] == 2
    assert report["engines"]["nanovllm"]["seconds"] == [2, 4]
    assert "2 rounds" in capsys.readouterr().out


# --- what is written ---


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_numbers_in_the_pages_are_those_of_the_files(page):
    text = page.read_text(encoding="utf-8")
    assert len(tables.MARK.findall(text)) == text.count("<!-- table ") >= 1
    assert tables.written(text, page) == text, "run python -m tutorials.measure.tables"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--requests", "0"], "'0' is not allowed: it must be a positive integer"),
        (
            ["--temperature", "hot"],
            "'hot' is not allowed: it must be 0 (greedy) or a positive number",
        ),
        (["--python", "vllm=/no/such/file"], "it must be ENGINE=INTERPRETER"),
        (["--tokens", "9", "8"], "MIN must be at most MAX"),
        (["--peer", "hf", "--rate", "2"], "--peer hf takes all requests at once"),
        (["--model", "x", "--random-weights", "qwen3-8b"], "give one"),
        (["--trace", "no-such-file.csv"], "no-such-file.csv is not a CSV"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, argv, message):
    monkeypatch.setattr(sys, "argv", ["bench.py", *argv])
    with pytest.raises(SystemExit) as error:
        bench.main()
    assert error.value.code == 2
    assert message in capsys.readouterr().err
