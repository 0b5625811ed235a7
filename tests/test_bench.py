"""bench.py: its workloads, its arithmetic, its weights, and one whole run. Speed is not tested."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import greedy
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))
import bench  # noqa: E402

TINY = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
    max_position_embeddings=64,
)


def parse(*argv):
    args = bench.parser().parse_args(argv)
    bench.check(args)
    return args


# --- workloads ---


def test_nano_vllm_workload():
    """Drawn as nano-vllm's bench draws it: all prompts, then all lengths."""
    requests = bench.make_requests(parse("--workload", "nano-vllm"), 151936)
    assert len(requests) == 256
    assert sum(request.max_tokens for request in requests) == 133_966
    rng = random.Random(0)
    length = rng.randint(100, 1024)
    assert requests[0].prompt == [rng.randint(0, 10000) for _ in range(length)]
    assert all(request.arrival == 0 for request in requests)


def test_token_ids_are_below_the_vocabulary():
    for argv in ([], ["--workload", "nano-vllm", "--requests", "9"]):
        requests = bench.make_requests(parse(*argv), 1536)
        assert max(max(request.prompt) for request in requests) < 1536
    assert bench.make_requests(parse(), 1536) == bench.make_requests(parse(), 1536)
    assert bench.make_requests(parse(), 1536) != bench.make_requests(parse("--seed", "1"), 1536)


def test_poisson_arrivals():
    arrivals = [r.arrival for r in bench.make_requests(parse("--requests", "2000", "--rate", "4"), 100)]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    assert arrivals[-1] / 1999 == pytest.approx(1 / 4, rel=0.1)


@pytest.fixture
def trace(tmp_path):
    rows = ["46.6805900,374,44", "50.6805900,396,109", "54.68059,7,0", "58.6805900,9,9"]
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16 18:15:{row}\n" for row in rows))
    return path


def test_trace(trace):
    """Its own intervals, scaled so that the mean rate is the one that was asked for."""
    trace.write_text(trace.read_text().replace("54.68059,", "55.6805900,"))
    rows = bench.read_trace(trace, None, rate=2)
    assert [row[:2] for row in rows] == [(374, 44), (396, 109), (7, 1), (9, 9)]  # a request has one token at least
    assert [row[2] for row in rows] == pytest.approx([0, 0.5, 1.125, 1.5])
    assert [row[2] for row in bench.read_trace(trace, 2, math.inf)] == [0, 0]
    args = parse("--trace", str(trace), "--requests", "3", "--rate", "1")
    requests = bench.make_requests(args, 50)
    assert [len(request.prompt) for request in requests] == [374, 396, 7]
    assert requests[-1].arrival == pytest.approx(2)
    assert args.temperature == 0


def test_what_is_no_trace(trace, tmp_path):
    with pytest.raises(ValueError, match="has 4 requests, not 5"):
        bench.read_trace(trace, 5, 1)
    trace.write_text("time,in,out\n1,2,3\n")
    with pytest.raises(ValueError, match="not a CSV of TIMESTAMP,ContextTokens,GeneratedTokens"):
        bench.read_trace(trace, None, 1)
    with pytest.raises(ValueError, match="not a CSV of"):
        bench.read_trace(tmp_path / "none.csv", None, 1)


def test_long_requests_are_cut():
    assert bench.cut(bench.Request([1] * 6, 4), 10) == bench.Request([1] * 6, 4)
    assert bench.cut(bench.Request([1] * 6, 5), 10) == bench.Request([1] * 6, 4)
    assert bench.cut(bench.Request([1] * 12, 5, 0.5), 10) == bench.Request([1] * 9, 1, 0.5)


# --- roofline ---

SHAPE = bench.Shape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, vocab=10, body=100, itemsize=2)


def test_visible_keys():
    for tokens, context in ((1, 1), (1, 9), (4, 4), (3, 8)):
        assert bench.visible_keys(tokens, context) == sum(range(context - tokens + 1, context + 1))


def test_work_of_a_decode_step():
    size, flops = bench.work_of(SHAPE, [(1, 5), (1, 8)], sampled=2)
    # weights, 2 embedding rows, the head; 13 keys and values read and 2 written, 2 layers x 3 numbers each
    assert size == 2 * (100 + 2 * 4 + 40 + (13 + 2) * 2 * 2 * 3)
    assert flops == 2 * 100 * 2 + 2 * 40 * 2 + 4 * 2 * 2 * 3 * 13


def test_work_of_a_chunk_that_is_not_sampled():
    size, flops = bench.work_of(SHAPE, [(3, 5)], sampled=0)
    assert size == 2 * (100 + 3 * 4 + (5 + 3) * 2 * 2 * 3)  # no head
    assert flops == 2 * 100 * 3 + 4 * 2 * 2 * 3 * (3 + 4 + 5)


def test_roofline():
    decode = bench.Step([(1, 5), (1, 8)], 2, run_seconds=3.0, seconds=4.0)  # 656 bytes and 1184 FLOPs
    chunk = bench.Step([(3, 5), (1, 8)], 1, run_seconds=5.0, seconds=5.0)
    report = bench.roofline(SHAPE, [decode, chunk, decode], bandwidth=656, flops_rate=1e9)
    assert report["decode"] == dict(steps=2, seconds=8, floor_seconds=2, floor_share=0.25, host_share=0.25)
    assert report["prefill"]["steps"] == 1 and report["prefill"]["host_share"] == 0
    bound_by_flops = bench.roofline(SHAPE, [decode], bandwidth=1e9, flops_rate=592)
    assert bound_by_flops["decode"]["floor_seconds"] == 2
    assert bound_by_flops["prefill"] == dict(steps=0, seconds=0, floor_seconds=0)


@pytest.mark.parametrize("name", [*bench.SHAPES, EMBEDDED_MODEL])
def test_parameters_are_counted_as_transformers_counts_them(name):
    is_file = name == EMBEDDED_MODEL
    config = AutoConfig.from_pretrained(name) if is_file else AutoConfig.for_model(**bench.SHAPES[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    body = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n and "lm_head" not in n)
    assert bench.shape_of(config.to_dict(), 2).body == body


# --- random weights ---


@pytest.mark.parametrize("family, tied", [("qwen3", True), ("qwen2", False)])
def test_random_weights(tmp_path, family, tied):
    path = tmp_path / "model"
    head = dict(head_dim=16) if family == "qwen3" else {}
    bench.write_checkpoint(bench.COMMON | TINY | dict(model_type=family, tie_word_embeddings=tied) | head, path)
    assert not list(tmp_path.glob("*.part"))
    settings = json.loads((path / "config.json").read_text())
    assert settings["rope_theta"] == settings.get("rope_parameters", settings)["rope_theta"] == 1e6
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()
    assert all(p.std() < 0.03 if p.dim() > 1 else p.unique().tolist() in ([0], [1]) for p in model.parameters())
    llm = LLM(str(path), dtype="float32")
    prompts = [[3, 1, 4, 1, 5], [9]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [greedy(model, prompt, 8) for prompt in prompts]


# --- engines ---


class Clockwork(bench.Loop):
    """Answers one request per step."""

    def __init__(self):
        self.queue, self.order = [], []

    def add(self, i, request):
        self.queue.append((i, request))
        self.order.append(i)

    def step(self):
        i, request = self.queue.pop(0)
        now = bench.time.perf_counter()
        return [(i, [7] * request.max_tokens, now, now + request.max_tokens - 1)]


def test_requests_are_handed_over_when_they_arrive():
    engine = Clockwork()
    answers = engine.run([bench.Request([1], 3, 0.05), bench.Request([1], 2), bench.Request([1], 1, 0.02)])
    assert engine.order == [1, 2, 0]
    assert [len(answer.token_ids) for answer in answers] == [3, 2, 1]
    assert all(0 <= answer.ttft < 0.05 for answer in answers)  # counted from the arrival, not from the start
    assert [answer.tpot for answer in answers] == [pytest.approx(1), pytest.approx(1), None]


FAKE_PEER = """
class SamplingParams:
    def __init__(self, **kwargs): self.__dict__ = kwargs
class LLM:
    def __init__(self, model, **kwargs): self.model = model
    def generate(self, prompts, params, use_tqdm):
        assert params[0].temperature > 0, "greedy is not permitted"
        return [{"token_ids": [1] * p.max_tokens} for p in params]
"""


@pytest.fixture
def fake_python(tmp_path):
    """An interpreter that has only another package with our name, and a stub of transformers."""
    (tmp_path / "nanovllm.py").write_text(FAKE_PEER)
    (tmp_path / "transformers.py").write_text("class AutoTokenizer: pass")
    (tmp_path / "nano_vllm-0.2.0.dist-info").mkdir()
    (tmp_path / "nano_vllm-0.2.0.dist-info" / "METADATA").write_text("Name: nano-vllm\nVersion: 0.2.0\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


JOB = dict(model="", max_model_len=64, vocab_size=9, requests=[([1, 2], 3, 0.0)] * 2, repeat=2)


def test_a_peer_with_our_name_in_its_own_environment(fake_python):
    result = bench.run_engine(fake_python, engine="nanovllm-original", temperature=0.6, **JOB)
    assert result["version"] == "0.2.0" and result["startup_seconds"] > 0
    assert [run["answers"] for run in result["runs"]] == [[[[1, 1, 1], None, None]] * 2] * 2


def test_a_peer_that_crashes_is_reported_with_its_last_line(fake_python, capsys):
    result = bench.run_engine(fake_python, engine="nanovllm-original", temperature=0, **JOB)
    assert result == {"error": "AssertionError: greedy is not permitted"}
    assert "Traceback" in capsys.readouterr().err


def test_the_whole_command(tmp_path):
    file = tmp_path / "results" / "out.json"
    options = "--requests 3 --tokens 4 9 --repeat 2 --peer hf nanovllm-original --option num_blocks=64"
    command = [sys.executable, "bench.py", *options.split(), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert {"commit", "device", "python", "dtype", "prompt_tokens", "cut_requests"} <= report.keys()
    assert report["requests"] == 3 and report["command"].startswith("python bench.py --requests 3")
    ours, hf = report["engines"]["nanovllm"], report["engines"]["hf"]
    for engine in (ours, hf):
        assert len(engine["seconds"]) == 2 and torch.__version__.startswith(engine["versions"]["torch"])
        speed = report["output_tokens"] / engine["output_tokens_per_second"]
        assert speed == pytest.approx(min(engine["seconds"]))
        assert engine["requests_per_second"] > 0 and engine["startup_seconds"] > 0
    assert hf["same_tokens"] == 1 and hf["ttft_p50"] is None
    assert 0 < ours["ttft_p50"] <= ours["ttft_p99"] and 0 < ours["tpot_p50"] <= ours["tpot_p99"]
    assert ours["kv_blocks"] == 64 and ours["kv_blocks_used_peak"] > 0
    assert ours["preemptions"] == ours["prefix_cache_hit_tokens"] == 0
    roofline = ours["roofline"]
    assert roofline["prefill"]["steps"] == 1 and 0 <= roofline["decode"]["host_share"] < 1
    assert roofline["decode"]["floor_seconds"] > 0 and ours["ceilings"]["bytes_per_second"] > 0
    assert report["engines"]["nanovllm-original"] == {"error": "not installed"}
    assert "nanovllm-original: not installed" in done.stdout and "100.0%" in done.stdout


# --- attention and report ---


@pytest.mark.parametrize("batch, queries, context", [(3, 1, 32), (1, 16, 16), (2, 5, 32)])
def test_attention_case(batch, queries, context):
    ceiling, case = dict(bytes_per_second=1e9, flops_per_second=1e9), bench.Case(4, 2, 16, batch, queries, context)
    row = bench.attention_case(case, torch.device("cpu"), torch.float32, ceiling)
    assert row["max_difference"] < 1e-5
    assert row["seconds"] > 0 and row["torch_seconds"] > 0
    size = 4 * (2 * batch * context * 2 * 16 + 2 * batch * queries * 4 * 16)
    assert row["bytes_per_second"] == pytest.approx(size / row["seconds"])


def test_preemption(monkeypatch, capsys):
    """What was swapped is not computed again, and everything is given back; the seconds are whatever they are."""
    engines, computed = [], []
    recovery = bench.recovery

    def watched(llm, context, swap):
        before = llm.num_computed_tokens
        seconds = recovery(llm, context, swap)
        engines.append(llm)
        computed.append((context, swap, llm.num_computed_tokens - before))
        return seconds

    monkeypatch.setattr(bench, "recovery", watched)
    args = bench.parser().parse_args(
        ["preemption", "--max-model-len", "300", "--repeat", "1", "--option", "swap_gib=0.1"]
    )
    report = bench.preemption(args)
    rows = report["preemption"]
    assert [(row["block_size"], row["context"]) for row in rows] == [(size, 250) for size in (1, 4, 16, 64, 256)]
    assert all(row["swap_out_seconds"] > 0 and row["recompute_seconds"] > 0 for row in rows)
    assert set(computed) == {(250, True, 250 + 5 + 1), (250, False, 250 + 5 + 256)}
    for llm in engines:
        llm.block_manager.check([])
        assert llm.block_manager.num_used_blocks == 0 and not llm.has_unfinished()
    assert "recompute" in capsys.readouterr().out


def test_percentile():
    assert bench.percentile([], 50) is None
    assert bench.percentile([3.0], 99) == 3
    assert bench.percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert bench.percentile(list(range(101)), 99) == 99
    assert bench.percentile([1.0, 2.0], 99) == pytest.approx(1.99)


def test_share_of_requests_with_the_same_tokens():
    run = lambda *tokens: {"seconds": 1.0, "answers": [[t, None, None] for t in tokens]}  # noqa: E731
    ours = {"runs": [run([1], [2]), run([3], [4])]}
    theirs = {"runs": [run([1], [9]), run([3], [4])], "version": "1"}
    assert bench.summary(theirs, 2, ours)["same_tokens"] == 0.75


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--requests", "0"], "'0' is not allowed: it must be a positive integer"),
        (["--rate", "-1"], "'-1' is not allowed: it must be a positive number, or inf"),
        (["--rate", "nan"], "'nan' is not allowed"),
        (["--temperature", "hot"], "'hot' is not allowed: it must be 0 (greedy) or a positive number"),
        (["--option", "block_size"], "'block_size' is not allowed: it must be NAME=VALUE"),
        (["--python", "vllm=/no/such/file"], "it must be ENGINE=INTERPRETER"),
        (["--peer", "nanovllm"], "choose from"),
        (["--random-weights", "qwen3-9b"], "choose from"),
        (["--tokens", "9", "8"], "MIN must be at most MAX"),
        (["--peer", "hf", "--rate", "2"], "--peer hf takes all requests at once"),
        (["--trace", "x.csv", "--tokens", "1", "2"], "--trace is a workload"),
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


def test_options_are_json_or_text():
    args = parse("--option", "num_blocks=8", "--option", "dtype=float32", "--option", "enforce_eager=true")
    assert dict(args.option) == {"num_blocks": 8, "dtype": "float32", "enforce_eager": True}
