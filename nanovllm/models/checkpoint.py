"""Checkpoint: opens safetensors files, and copies their tensors into parameters."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanovllm.layers.linear import Groups, Linear


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The tensors of a safetensors file. Raises ValueError if it is damaged."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete: {error}") from error


class Reader:
    """Reads the files of a checkpoint whose weights are plain numbers."""

    def add_parameters(self, model: nn.Module) -> None:
        """Adds what the layers have besides weights and biases: nothing."""

    def groups_of(self, linear: Linear) -> Groups | None:
        """The groups of a loaded layer, if the checkpoint stores its weight in few bits."""
        return None

    def tensors_of(self, file: Path) -> AbstractContextManager[Any]:
        """A context manager with the tensors of a file, as those of an ordinary checkpoint."""
        return opened(file)


def get_tensor(tensors: Any, name: str) -> Tensor:
    return tensors.get_tensor(name)


def load_into(target: Tensor, tensor: Tensor, name: str, file: Path) -> None:
    """Copies the tensor to its place, in the target's dtype. Raises ValueError if the tensor has
    fewer than 16 bits, or integers: "{file}: {name} has dtype torch.int8: use the model's
    unquantized checkpoint". Then, if the shapes differ: "{file}: {name} has shape [7], but
    config.json requires [48]"."""
    if tensor.itemsize < 2 or not tensor.is_floating_point():
        raise ValueError(
            f"{file}: {name} has dtype {tensor.dtype}: use the model's unquantized checkpoint"
        )
    if tensor.shape != target.shape:
        shapes = f"has shape {[*tensor.shape]}, but config.json requires {[*target.shape]}"
        raise ValueError(f"{file}: {name} {shapes}")
    target.copy_(tensor)
