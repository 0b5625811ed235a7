"""What suits a machine on which CUDA or Triton cannot start: a sentence with the remedy, and PyTorch where it is allowed
to choose. No GPU is needed.

Run: pytest tests/device/test_choose.py
"""

import sys
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch

from nanovllm import backends
from nanovllm.backends import torch_ops
from nanovllm.config import Config
from nanovllm.device import choose
from nanovllm.layers.ops import try_out

GPU = torch.device("cuda", 0)
NO_GCC = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
NO_HEADERS = CalledProcessError(1, ["/usr/bin/gcc", "/tmp/cuda_utils.c", *["-I/include"] * 90])
TOO_OLD = RuntimeError("PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\nsm_52")
MODULE = "nanovllm.backends.triton_ops"


def choose_on_gpu(monkeypatch, backend: str, errors: dict[str, Exception]):
    """The backend that is chosen on a GPU, on which these raise errors when they are tried out."""
    monkeypatch.setattr(backends, "triton_ops", SimpleNamespace(__name__=MODULE), raising=False)

    def try_out(ops, device):
        assert device == GPU
        if ops.__name__ in errors:
            raise errors[ops.__name__]

    monkeypatch.setattr(choose, "try_out", try_out)
    return choose.choose_ops(Config(attention_backend=backend), GPU, torch.bfloat16)


@pytest.mark.parametrize(
    "error, reason",
    [(NO_GCC, "Failed to find C compiler"), (NO_HEADERS, "'/usr/bin/gcc'"), (TOO_OLD, "PTXAS")],
)
def test_where_triton_cannot_start(monkeypatch, caplog, error, reason):
    assert choose_on_gpu(monkeypatch, "auto", {MODULE: error}) is torch_ops
    (warning,) = caplog.messages
    with pytest.raises(ValueError, match="^attention_backend='triton' is not allowed: ") as refused:
        choose_on_gpu(monkeypatch, "triton", {MODULE: error})
    for text in (warning, str(refused.value)):
        assert reason in text and "apt install gcc python3-dev" in text
        assert "attention_backend='torch'" in text
        assert "\n" not in text and len(text) < 500


@pytest.mark.parametrize("backend", ["auto", "triton", "torch", "vattention"])
def test_a_gpu_that_pytorch_cannot_use(monkeypatch, backend):
    error = RuntimeError("CUDA error: no kernel image is available for execution on the device")
    message = "is not allowed: only 'cpu' works here: .*no kernel image"
    with pytest.raises(ValueError, match=message):
        choose_on_gpu(monkeypatch, backend, {torch_ops.__name__: error})


def test_where_all_is_well(monkeypatch, caplog):
    for backend in ("auto", "triton"):
        assert choose_on_gpu(monkeypatch, backend, {}) is backends.triton_ops
    assert choose_on_gpu(monkeypatch, "torch", {}) is torch_ops
    assert not caplog.messages


def test_without_triton_pytorch_computes_and_says_nothing(monkeypatch, caplog):
    """As on Windows, where nothing can be installed."""
    monkeypatch.setitem(sys.modules, MODULE, None)
    monkeypatch.delattr(backends, "triton_ops", raising=False)
    monkeypatch.setattr(choose, "try_out", lambda ops, device: None)
    config = Config(attention_backend="auto")
    assert choose.choose_ops(config, GPU, torch.bfloat16) is torch_ops and not caplog.messages
    config = Config(attention_backend="triton")
    with pytest.raises(ValueError, match="attention_backend='triton' .* triton needs a GPU"):
        choose.choose_ops(config, GPU, torch.bfloat16)


def test_what_is_tried_raises_what_a_kernel_raises():
    def silu_and_mul(x):
        assert x.shape[1] % 2 == 0 and x.device.type == "cpu"
        raise NO_GCC

    cpu = torch.device("cpu")
    try_out(torch_ops, cpu)
    with pytest.raises(RuntimeError, match="Failed to find C compiler"):
        try_out(SimpleNamespace(silu_and_mul=silu_and_mul), cpu)
