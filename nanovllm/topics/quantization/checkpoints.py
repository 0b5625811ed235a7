"""Checkpoints whose weights are quantized already: GPTQ and AWQ in 4 and 8 bits, FP8 in blocks.

The loader sees the tensors of an ordinary checkpoint. With GPTQ and AWQ, a layer's weight [out, in]
is its codes, loaded like numbers, and `scales` and `zeros` [out, groups] are two more parameters.
With FP8, a weight is what its numbers and scales stand for.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.checkpoint import Reader, opened
from nanovllm.layers.linear import Linear
from nanovllm.options import shown
from nanovllm.topics.quantization.groups import SIZES, Groups, packed

logger = logging.getLogger(__name__)

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where AWQ has the columns of an int32, lowest bits first
BLOCK = 128  # of FP8: a scale for 128 x 128 numbers
ALLOWED: dict[str, dict[str, tuple]] = {  # of a method: its settings
    "gptq": {
        "bits": (4, 8),
        "group_size": SIZES,
        "desc_act": (False, None),
        "checkpoint_format": ("gptq", "gptq_v2", None),
    },
    "awq": {"bits": (4,), "group_size": SIZES, "version": ("gemm", None)},
    "fp8": {"weight_block_size": ([BLOCK, BLOCK],)},
}


class Method(NamedTuple):
    """How the weights of a checkpoint are quantized."""

    name: str
    bits: int
    group: int
    is_shifted: bool  # whether a stored zero is one less than the zero, as in GPTQ's first format

    @property
    def has_codes(self) -> bool:
        """Whether weights stay codes. FP8 becomes ordinary numbers."""
        return self.name != "fp8"


def method_of(config) -> Method | None:
    """The method in a model's Hugging Face config, if it has one. Raises ValueError if the method
    is not supported."""
    settings = dict(getattr(config, "quantization_config", None) or {})
    if not settings:
        return None
    name = str(settings.get("quant_method"))
    if name not in ALLOWED:
        supported = "gptq, awq and fp8 are; or use the model's unquantized checkpoint"
        raise ValueError(f"quantization by {name!r} is not supported: {supported}")
    for field, values in ALLOWED[name].items():
        if settings.get(field) not in values:
            found = f"quantization by {name!r} with {field}={shown(settings.get(field))}"
            raise ValueError(f"{found} is not supported: it must be one of {values}")
    is_shifted = name == "gptq" and settings.get("checkpoint_format") != "gptq_v2"
    return Method(name, settings.get("bits", 8), settings.get("group_size", BLOCK), is_shifted)


def numbers_per_scale(config) -> int:
    method = method_of(config)
    return 1 if method is None else method.group


class QuantizedReader(Reader):
    """Reads the files of a quantized checkpoint. Raises ValueError if scales are missing."""

    def __init__(self, config, files: list[Path]):
        method = method_of(config)
        assert method is not None
        self.method = method
        self.files: dict[str, Path] = {}
        self.surplus: set[str] = set()  # biases that the model does not have
        quantized = []
        for file in files:
            with opened(file) as tensors:
                names = [*tensors.keys()]
                self.files |= dict.fromkeys(names, file)
                quantized += [name for name in names if is_quantized(tensors, name)]
        for name in quantized:
            self.check(name)
        if not method.has_codes:
            logger.info("The FP8 weights of the checkpoint are converted while it loads")

    def check(self, name: str) -> None:
        """Raises ValueError if a quantized weight has no scales."""
        layer, _, kind = name.rpartition(".")
        others = ["scales", "qzeros"] if kind == "qweight" else [f"{kind}_scale_inv"]
        for other in others:
            if f"{layer}.{other}" not in self.files:
                raise ValueError(f"{self.files[name]}: {layer} has a {kind}, but no {other}")

    def add_parameters(self, model: nn.Module) -> None:
        for prefix, module in model.named_modules():
            if not isinstance(module, Linear):
                continue
            parent = prefix.rpartition(".")[0]
            layers = [f"{parent}.{part}" for part in module.part_slices] or [prefix]
            if f"{layers[0]}.qweight" not in self.files:
                continue
            if module.bias is None:
                self.surplus |= {f"{layer}.bias" for layer in layers}
            num_out, num_in = module.weight.shape
            module.bits = self.method.bits  # type: ignore[assignment]
            for kind in ("scales", "zeros"):
                shape = (num_out, num_in // self.method.group)
                numbers = torch.empty(shape, device="meta")
                module.register_parameter(kind, nn.Parameter(numbers, requires_grad=False))

    @contextmanager
    def tensors_of(self, file: Path) -> Iterator["View"]:
        with opened(file) as tensors:
            yield View(tensors, self)

    def scale_of(self, name: str) -> Tensor:
        """The scales of an FP8 weight, which may be in another file."""
        scale = f"{name}_scale_inv"
        with opened(self.files[scale]) as tensors:
            return tensors.get_tensor(scale)


class View:
    """A file of a quantized checkpoint, as if it were an ordinary one."""

    def __init__(self, tensors: Any, reader: QuantizedReader):
        self.tensors = tensors
        self.reader = reader
        self.stored = {}  # the name that the loader sees -> the stored name
        for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
            if name in reader.surplus and not tensors.get_tensor(name).any():
                continue  # GPTQ's tools give each layer a bias
            if not name.endswith(("g_idx", "weight_scale_inv")):
                layer, _, kind = name.rpartition(".")
                kind = {"qweight": "weight", "qzeros": "zeros"}.get(kind, kind)
                self.stored[f"{layer}.{kind}"] = name

    def keys(self) -> list[str]:
        return [*self.stored]

    def get_slice(self, name: str) -> "Whole":
        return Whole(self.get_tensor(name))

    def get_tensor(self, name: str) -> Tensor:
        stored = self.stored[name]
        tensor = self.tensors.get_tensor(stored)
        if tensor.dtype == torch.float8_e4m3fn:
            return scaled(tensor, self.reader.scale_of(stored))
        method = self.reader.method
        if stored.endswith("qweight"):
            is_awq = method.name == "awq"
            return integers(tensor, method).T if is_awq else integers(tensor.T, method)
        if stored.endswith("qzeros"):
            zeros = integers(tensor, method) + method.is_shifted
            return (zeros % 2**method.bits).T
        return tensor.T if stored.endswith("scales") else tensor


class Whole:
    """A tensor with the methods of a slice of a safetensors file."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return [*self.tensor.shape]

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


def is_quantized(tensors: Any, name: str) -> bool:
    return name.endswith("qweight") or tensors.get_slice(name).get_dtype() == "F8_E4M3"


def integers(tensor: Tensor, method: Method) -> Tensor:
    """int32 [n, m] as fp32 [n, m * 32 / bits]: what the int32 hold, the lowest bits first."""
    shifts = torch.arange(0, 32, method.bits, dtype=torch.int32)
    numbers = (tensor.unsqueeze(-1) >> shifts) & (2**method.bits - 1)
    if method.name == "awq":
        numbers = numbers[..., AWQ_ORDER]
    return numbers.flatten(1).float()


def scaled(tensor: Tensor, scales: Tensor) -> Tensor:
    """An FP8 weight [out, in] in fp32. `scales` has a number for each block."""
    num_out, num_in = tensor.shape
    rows = scales.float().repeat_interleave(BLOCK, 0)[:num_out]
    return tensor.float() * rows.repeat_interleave(BLOCK, 1)[:, :num_in]


def groups_of(linear: Linear) -> Groups | None:
    """The groups of a layer whose codes, scales and zeros are loaded; None for any other layer."""
    if not hasattr(linear, "scales"):
        return None
    scales, zeros = linear.get_parameter("scales").data, linear.get_parameter("zeros").data
    codes = linear.weight.data.float().unflatten(1, (scales.shape[1], -1))
    del linear.scales, linear.zeros
    if linear.bits == 4:
        return Groups(packed(codes), scales, zeros.to(torch.uint8))
    numbers = codes - zeros.unsqueeze(-1)
    if numbers.min() < -128 or numbers.max() > 127:
        raise ValueError("codes of 8 bits with zeros far from 128 are not supported")
    return Groups(numbers.to(torch.int8), scales, None)
