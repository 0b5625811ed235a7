"""Checkpoints whose weights are quantized already: GPTQ and AWQ in 4 and 8 bits, FP8 in blocks.

The loader sees the tensors of an ordinary checkpoint. With GPTQ and AWQ, a layer's weight [out, in]
is its codes, loaded like numbers, and `scales` and `zeros` [out, groups] are two more parameters.
With FP8, a weight is what its numbers and scales stand for.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from nanovllm.checkpoint import Reader, opened
from nanovllm.layers.linear import Linear
from nanovllm.topics.quantization.groups import SIZES, Groups, packed
from nanovllm.topics.quantization.methods import ALLOWED, BLOCK, method_of

logger = logging.getLogger(__name__)

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where AWQ has the columns of an int32, lowest bits first
FLOATS = ("F16", "BF16", "F32")  # as safetensors names dtypes
DTYPES = {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS, "g_idx": ("I32", "I64")}
# the loader does not see these; the last four are for activations and caches in 8 bits
APART = ("g_idx", "weight_scale_inv", "input_scale", "q_scale", "k_scale", "v_scale")


class Stored(NamedTuple):
    """What a file says of a tensor before it is read."""

    file: Path
    dtype: str
    shape: list[int]


class Codes(NamedTuple):
    """How the codes of a layer are stored."""

    bits: int
    group: int

    def shapes(self, qweight: list[int], method: str) -> dict[str, list[int]]:
        """The shapes of the layer's other tensors."""
        rows, columns = qweight
        per_int32 = 32 // self.bits
        if method == "awq":
            columns *= per_int32
        else:
            rows *= per_int32
        num_groups = rows // self.group
        scales = [num_groups, columns]
        zeros = [num_groups, columns // per_int32]
        return {"g_idx": [rows], "scales": scales, "qzeros": zeros}


class QuantizedReader(Reader):
    """Reads the files of a quantized checkpoint. Before a weight is read, each tensor's dtype and
    shape are compared with the others of its layer. ValueError names the tensor that is wrong."""

    def __init__(self, hf_config, files: list[Path]):
        method = method_of(hf_config)
        assert method is not None
        self.method = method
        self.stored: dict[str, Stored] = {}
        self.files: dict[Path, Any] = {}  # that `tensor` has opened
        self.codes: dict[str, Codes] = {}  # of each layer that has codes
        self.surplus: set[str] = set()  # biases that the model does not have
        for file in files:
            with opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                    part = tensors.get_slice(name)
                    self.stored[name] = Stored(file, part.get_dtype(), part.get_shape())
        for name, stored in self.stored.items():
            layer, _, kind = name.rpartition(".")
            if kind == "qweight":
                self.codes[layer] = self.codes_of(layer)
            elif stored.dtype == "F8_E4M3":
                self.check_fp8(name)
        if hf_config.tie_word_embeddings and "lm_head" in self.codes:
            raise self.wrong("lm_head.qweight", "cannot be loaded: tie_word_embeddings is true")
        if not method.has_codes:
            logger.info("The FP8 weights of the checkpoint are converted while it loads")

    # --- checks ---

    def wrong(self, name: str, problem: str) -> ValueError:
        return ValueError(f"{self.stored[name].file}: {name} {problem}")

    def require(self, name: str, dtypes: tuple[str, ...], shape: list[int]) -> None:
        """Raises ValueError if a tensor has another dtype or another shape."""
        stored = self.stored[name]
        if stored.dtype not in dtypes:
            raise self.wrong(name, f"has dtype {stored.dtype}: it must be {' or '.join(dtypes)}")
        if stored.shape != shape:
            raise self.wrong(name, f"has shape {stored.shape}: it must be {shape}")

    def names_of(self, layer: str) -> dict[str, str]:
        """The tensors of a layer with codes, by their kinds. Zeros that are not read are left
        out."""
        names = {}
        for kind in DTYPES:
            name = f"{layer}.{kind}"
            if name in self.stored:
                names[kind] = name
        file = self.stored[names["qweight"]].file
        if self.method.is_symmetric:
            zeros = self.stored.get(f"{layer}.qzeros")
            if zeros is not None and (zeros.dtype != "I32" or 0 in zeros.shape):
                del names["qzeros"]
        needed = ["scales"] if self.method.is_symmetric else ["scales", "qzeros"]
        for kind in needed:
            if kind not in names:
                raise ValueError(f"{file}: {layer} has a qweight, but no {kind}")
        if f"{layer}.weight" in self.stored:
            raise ValueError(f"{file}: {layer} has a qweight and a weight")
        return names

    def codes_of(self, layer: str) -> Codes:
        """The bits and the group of a layer: those of the config, or others that all its shapes fit
        (GPTQModel's `dynamic` settings)."""
        if not self.method.has_codes:
            problem = f"holds codes, but quant_method is {self.method.name!r}"
            raise self.wrong(f"{layer}.qweight", problem)
        names = self.names_of(layer)
        name = names.pop("qweight")
        qweight = self.stored[name].shape
        if len(qweight) != 2:
            raise self.wrong(name, f"has shape {qweight}, and not two dimensions")
        self.require(name, DTYPES["qweight"], qweight)
        method = self.method
        own = Codes(method.bits, method.group)
        others = starmap(Codes, product(ALLOWED[method.name]["bits"], SIZES))
        stored = {kind: self.stored[name].shape for kind, name in names.items()}
        shapes = {codes: codes.shapes(qweight, method.name) for codes in (own, *others)}
        fitting = [codes for codes in shapes if stored.items() <= shapes[codes].items()]
        found = fitting[0] if fitting else own
        for kind, shape in shapes[found].items():
            if kind in names:
                self.require(names[kind], DTYPES[kind], shape)
        if "g_idx" in names:
            self.check_order(names["g_idx"], found.group)
        return found

    def check_order(self, name: str, group: int) -> None:
        """Raises ValueError if the columns of a layer are not in the order of their groups. Some
        tools store zeros only: then they are."""
        groups = self.tensor(name)
        in_order = torch.arange(len(groups)) // group
        if groups.any() and not torch.equal(groups.long(), in_order):
            problem = "is not in order (act order): a checkpoint with desc_act=false is needed"
            raise self.wrong(name, problem)

    def check_fp8(self, name: str) -> None:
        """Raises ValueError if an FP8 weight has not a scale for each block."""
        stored = self.stored[name]
        layer, _, kind = name.rpartition(".")
        if f"{name}_scale_inv" not in self.stored:
            raise ValueError(f"{stored.file}: {layer} has a {kind}, but no {kind}_scale_inv")
        if len(stored.shape) != 2:
            raise self.wrong(name, f"has shape {stored.shape}, and not two dimensions")
        blocks = [-(-size // BLOCK) for size in stored.shape]
        self.require(f"{name}_scale_inv", (*FLOATS, "F8_E8M0"), blocks)

    # --- what the loader calls ---

    def add_parameters(self, model: nn.Module) -> None:
        for prefix, module in model.named_modules():
            if not isinstance(module, Linear):
                continue
            parent = prefix.rpartition(".")[0]
            layers = [f"{parent}.{part}" for part in module.part_slices] or [prefix]
            if not self.codes.keys() & {*layers}:
                continue
            codes = self.codes.get(layers[0])
            if codes is None or any(self.codes.get(layer) != codes for layer in layers):
                same = "must all be quantized, with the same bits and group_size"
                raise ValueError(f"the checkpoint cannot be loaded: {', '.join(layers)} {same}")
            if module.bias is None:
                self.surplus |= {f"{layer}.bias" for layer in layers}
            num_out, num_in = module.weight.shape
            module.codes = prefix, codes.bits  # type: ignore[assignment]
            for kind in ("scales", "zeros"):
                shape = (num_out, num_in // codes.group)
                numbers = torch.empty(shape, device="meta")
                module.register_parameter(kind, nn.Parameter(numbers, requires_grad=False))

    @contextmanager
    def tensors_of(self, file: Path) -> Iterator["View"]:
        with opened(file) as tensors:
            yield View(tensors, self)

    def tensor(self, name: str) -> Tensor:
        """A tensor that may be in another file than the one that is read."""
        file = self.stored[name].file
        if file not in self.files:  # each opening reads a header
            self.files[file] = safe_open(file, framework="pt")
        return self.files[file].get_tensor(name)


class View:
    """A file of a quantized checkpoint, as if it were an ordinary one."""

    def __init__(self, tensors: Any, reader: QuantizedReader):
        self.tensors = tensors
        self.reader = reader
        self.is_awq = reader.method.name == "awq"
        self.names = {}  # the name that the loader sees -> the stored name
        for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
            if name in reader.surplus and not tensors.get_tensor(name).any():
                continue  # GPTQ's tools give each layer a bias
            layer, _, kind = name.rpartition(".")
            if kind in APART or name.endswith(APART):
                continue
            if reader.method.is_symmetric and kind == "scales":
                self.names[f"{layer}.zeros"] = name  # whose shape they have
            if not (reader.method.is_symmetric and kind == "qzeros"):
                kind = {"qweight": "weight", "qzeros": "zeros"}.get(kind, kind)
                self.names[f"{layer}.{kind}"] = name

    def keys(self) -> list[str]:
        return [*self.names]

    def get_slice(self, name: str) -> Tensor:
        return self.get_tensor(name)

    def get_tensor(self, name: str) -> Tensor:
        stored = self.names[name]
        tensor = self.tensors.get_tensor(stored)
        if tensor.dtype == torch.float8_e4m3fn:
            return scaled(tensor, self.reader.tensor(f"{stored}_scale_inv"))
        layer, _, kind = name.rpartition(".")
        if layer not in self.reader.codes or kind == "bias":
            return tensor
        bits = self.reader.codes[layer].bits
        if kind == "scales":
            return tensor.T
        if kind == "zeros" and self.reader.method.is_symmetric:
            return torch.full_like(tensor.T, 2 ** (bits - 1))
        if kind == "zeros":
            zeros = integers(tensor, bits, self.is_awq)
            zeros += self.reader.method.is_shifted
            return (zeros % 2**bits).T
        if self.is_awq:
            return integers(tensor, bits, True).T
        return integers(tensor.T, bits, False)


def integers(tensor: Tensor, bits: int, is_awq: bool) -> Tensor:
    """int32 [n, m] as fp32 [n, m * 32 / bits]: what the int32 hold, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (tensor.unsqueeze(-1) >> shifts) & (2**bits - 1)
    if is_awq:
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
    name, bits = linear.codes  # type: ignore[misc]
    if bits == 4:
        return Groups(packed(codes), scales, zeros.to(torch.uint8))
    numbers = codes - zeros.unsqueeze(-1)
    if numbers.min() < -128 or numbers.max() > 127:
        raise ValueError(f"{name} has codes of 8 bits with zeros far from 128: not supported")
    return Groups(numbers.to(torch.int8), scales, None)
