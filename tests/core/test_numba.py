"""The compiled kernels for a CPU: threads, numbers of 16 bits, the engine, and files on disk. For the results of each
kernel, see test_ops.py.

Run: pytest tests/core/test_numba.py [-k thread]
"""

import os
import platform
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.backends import numba_ops, torch_ops
from nanovllm.config import Config
from nanovllm.device.choose import choose_ops
from nanovllm.layers import numba_kernels, numba_products, numba_run
from tutorials.measure.batches import random_batch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("num_threads", [1, 5])
def test_a_decode_is_the_same_in_any_company_on_any_number_of_threads(monkeypatch, num_threads):
    """To the last bit: alone, and beside others, with threads that share the programs."""
    monkeypatch.setattr(numba_run, "SMALL", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    batch, _ = random_batch([(1, 9), (1, 33), (1, 40), (1, 1)], 2, 32)
    batch.kv_cache.tensor.nan_to_num_()
    q = torch.randn(4, 4, 32)
    batch.layout = numba_ops.layout(batch)
    together = numba_ops.paged_attention(q, batch, 1, 0.25)
    for b in range(4):
        tables = batch.block_tables[batch.cu_blocks[b] : batch.cu_blocks[b + 1]].clone()
        alone = replace(
            batch,
            slot_mapping=batch.slot_mapping[b : b + 1],
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=batch.context_lens[b : b + 1].clone(),
            cu_blocks=torch.tensor([0, len(tables)], dtype=torch.int32),
            block_tables=tables,
            num_decodes=1,
        )
        alone.layout = numba_ops.layout(alone)
        out = numba_ops.paged_attention(q[b : b + 1], alone, 1, 0.25)
        assert torch.equal(out[0], together[b])


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("num_threads", [5, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_in_tiles(monkeypatch, dtype, num_threads):
    """Right for any numbers of rows and outputs, and a row is the same in any company, to the last bit."""
    monkeypatch.setattr(numba_run, "SMALL", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    for size in (7, 64, 100):
        for num_out in (1, 11, 12, 50):
            x, weight = torch.randn(70, size), torch.randn(num_out, size)
            x, weight, bias = x.to(dtype), weight.to(dtype), torch.randn(num_out).to(dtype)
            all_rows = numba_ops.in_tiles(x, weight, bias)
            expected = x.double() @ weight.T.double() + bias
            close = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(all_rows.double(), expected, rtol=close, atol=close)
            for num_rows in (1, 2, 3, 5, 66):
                some = numba_ops.in_tiles(x[-num_rows:], weight, bias)
                assert torch.equal(some, all_rows[-num_rows:])
    no_bias = numba_ops.in_tiles(x, weight, None)
    torch.testing.assert_close(no_bias + bias, all_rows, rtol=close, atol=close)


WIDE = """
import llvmlite.binding

features = dict.fromkeys(["avx2", "fma", "avx512f", "avx512vl", "avx512vnni"], True)
llvmlite.binding.get_host_cpu_name = lambda: "icelake-server"
llvmlite.binding.get_host_cpu_features = lambda: llvmlite.binding.FeatureMap(features)
from numba import types
from nanovllm.layers.numba_tiles import multiply_tiles

matrix = types.Array(types.float32, 2, "C")
biases = types.Array(types.float32, 1, "C")
multiply_tiles.compile((matrix, matrix, matrix, biases, types.int64, types.int64))  # runs nothing
(code,) = multiply_tiles.inspect_asm().values()
print(sum("vfmadd" in line and "%zmm" in line for line in code.splitlines()))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor's registers")
def test_kernels_have_512_bits_where_the_clock_stays(tmp_path):
    """The 12 sums of a tile, as they are compiled for a processor of Intel's with VNNI."""
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", WIDE], env=env, capture_output=True, text=True)
    assert run.stdout.split() == ["12"], run.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_read_exactly_and_rounded_to_even(dtype):
    """All numbers, compiled; and those half way between two, and a little beside."""
    integer = numba_run.INTEGERS[dtype]
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    numbers = np.empty(len(exact), np.float32)
    read(exact.view(integer).numpy(), numbers)
    assert np.array_equal(numbers, exact.float().numpy(), equal_nan=True)
    finite = exact[exact.isfinite()].float()
    half = finite.abs() * (2.0**-9 if dtype == torch.bfloat16 else 2.0**-12)
    tiny = finite.abs().clamp(min=2.0**-14) * 2.0**-11 if dtype == torch.float16 else half
    inputs = torch.cat([finite, finite + half, finite + tiny, finite + 0.99 * half, finite * 1.7])
    outputs = np.empty(len(inputs), str(integer)[6:])
    round_all(inputs.numpy(), outputs)
    expected = inputs.to(dtype)
    assert torch.equal(torch.from_numpy(outputs).view(dtype), expected)


@numba_kernels.kernel
def read(bits, numbers):
    for i in range(len(bits)):
        numbers[i] = numba_kernels.as_float32(bits[i])


@numba_kernels.kernel
def round_all(numbers, bits):
    for i in range(len(bits)):
        bits[i] = numba_kernels.rounded(numbers[i], bits[i])


# --- the engine ---

GREEDY = SamplingParams(temperature=0, max_tokens=30)
PROMPTS = ["Once upon a time", "what is 347 + 285?", "a long one " * 20, "list primes"]


def tokens() -> list[list[int]]:
    llm = LLM(attention_backend="numba", num_blocks=200)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
def test_two_threads_have_an_engine_each(monkeypatch):
    monkeypatch.setattr(numba_run, "SMALL", 0)
    expected, found = tokens(), {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: tokens()})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: expected, 1: expected}


@pytest.mark.slow
def test_python_runs_the_kernels_as_they_stand():
    """So that a reader can put a print into them."""
    code = """
from nanovllm import LLM, SamplingParams
from nanovllm.backends import numba_ops
llm = LLM(attention_backend="numba", num_blocks=4, max_num_seqs=1)
assert llm.generate("7", SamplingParams(max_tokens=1), use_tqdm=False)
assert not hasattr(numba_ops.add_and_norm_kernel, "signatures")
print("right")
"""
    environ = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)  # fmt: skip
    assert done.stdout == "right\n", done.stderr


def test_without_numba_it_is_torch_or_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it could not be imported
    for name in ("backends.numba_ops", "layers.numba_kernels"):
        monkeypatch.delitem(sys.modules, f"nanovllm.{name}")
        monkeypatch.delattr(f"nanovllm.{name}")
    assert LLM(num_blocks=10).runner.ops is torch_ops
    with pytest.raises(ValueError, match="attention_backend='numba' .* needs the extra `cpu`: "):
        LLM(attention_backend="numba")


def test_on_a_gpu_it_is_refused():
    config = Config(attention_backend="numba")
    with pytest.raises(ValueError, match="attention_backend='numba' .* another one on CUDA"):
        choose_ops(config, torch.device("cuda", 0), torch.float32)


def test_nothing_is_compiled_after_the_start():
    """Whatever a step brings: one decode or many, chunks, a prefix, sampling, a single token."""
    llm = LLM(num_blocks=60, block_size=4, max_num_batched_tokens=24, max_num_seqs=8)
    kernels = [value for value in vars(numba_ops).values() if hasattr(value, "signatures")]
    kernels.append(numba_kernels.decode_kernel(32, 3))
    assert llm.runner.ops is numba_ops and len(kernels) == 7
    before = [[*kernel.signatures] for kernel in kernels]
    params = [SamplingParams(n=n, max_tokens=9, seed=n) for n in (1, 3)]
    for prompts in (["7"], PROMPTS[:2], PROMPTS):
        for one in params:
            llm.generate(prompts, one, use_tqdm=False)
    llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert [[*kernel.signatures] for kernel in kernels] == before


# --- what is kept on disk ---


@pytest.fixture(autouse=True)
def beside_its_file(monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")  # whatever NUMBA_CACHE_DIR says


DOUBLE = "def double(x):\n    for i in range(len(x)):\n        x[i] *= 2\n"


def double_in(folder: Path) -> tuple[Callable, list[Path]]:
    """A kernel from a file in this folder, after it has been right once; and what was kept."""
    path = folder / "double.py"
    path.write_text(DOUBLE)
    scope = runpy.run_path(str(path))
    double = numba_kernels.kernel(scope["double"])
    x = np.ones(3)
    double(x)
    assert x.tolist() == [2, 2, 2]
    return double, sorted(folder.rglob("*.nb*"))


def test_a_kernel_is_compiled_once(tmp_path):
    first, files = double_in(tmp_path)
    assert [file.suffix for file in files] == [".nbc", ".nbi"] and not first.stats.cache_hits
    again, _ = double_in(tmp_path)
    assert again.stats.cache_hits and not again.stats.cache_misses


@pytest.mark.slow(but_every=5)
@pytest.mark.parametrize("broken", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_a_broken_file_is_made_again(tmp_path, broken, content, caplog):
    _, files = double_in(tmp_path)
    (file,) = [file for file in files if file.suffix == f".{broken}"]
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    double, _ = double_in(tmp_path)
    assert double.stats.cache_misses and "a broken file, compiling again" in caplog.text
    again, _ = double_in(tmp_path)
    assert again.stats.cache_hits


def test_code_that_another_process_has_written_is_not_run(tmp_path):
    """If two write at the same time, the index may lead to code for other types, and would to that for other numbers."""
    double, _ = double_in(tmp_path)
    double(np.ones(3, np.float32))
    of_float64, of_float32 = sorted(tmp_path.rglob("*.nbc"))
    of_float64.write_bytes(of_float32.read_bytes())
    again, _ = double_in(tmp_path)  # which is right
    assert again.stats.cache_misses
    kernels = [numba_kernels.decode_kernel(32, group) for group in (2, 3)]
    assert len({kernel._cache._cache_file._index_name for kernel in kernels}) == 2


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch, caplog):
    """Kernels are kept in the user's own folder, or not at all."""
    (tmp_path / "__pycache__").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(sys, "platform", "linux")
    _, files = double_in(tmp_path)
    assert len(files) == 2 and files[0].is_relative_to(tmp_path / "own")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    double_in(tmp_path)
    assert "cannot be kept: set NUMBA_CACHE_DIR to a folder" in caplog.text


def test_a_kernel_is_compiled_again_when_any_file_that_it_is_made_of_changes():
    for form, file in ((numba_products.IN_8_BITS, "prefetch"), (numba_products.IN_4_BITS, "lanes")):
        assert f"numba_{file}.py" in str(numba_kernels.made_of(form.multiply.py_func, str))
