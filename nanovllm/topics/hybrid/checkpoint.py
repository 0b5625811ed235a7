"""TextReader: the language model's tensors in the files of a Qwen3.5 checkpoint."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from nanovllm.checkpoint import Reader, opened
from nanovllm.topics.hybrid.model import order_of

logger = logging.getLogger(__name__)

LONG, SHORT = "model.language_model.", "model."  # prefixes, with and without a vision model
SKIPPED = ("model.visual.", "mtp.")  # of images, and of guesses of further tokens


class TextReader(Reader):
    """Lets another reader read the files. The loader sees the names of `HybridModel`."""

    def __init__(self, reader: Reader, hf_config, files: list[Path]):
        self.reader = reader
        self.order = order_of(hf_config)
        names: list[str] = []
        for file in files:
            with opened(file) as tensors:
                names += tensors.keys()
        self.prefix = LONG if any(name.startswith(LONG) for name in names) else SHORT
        skipped = sum(name.startswith(SKIPPED) for name in names)
        if skipped:
            kinds = " and ".join(kind.rstrip(".") for kind in SKIPPED)
            logger.info("%s tensors of %s are not loaded: only text goes in", skipped, kinds)

    def stored(self, name: str) -> str:
        """The name of a module, or a tensor, in the files."""
        return name.replace(SHORT, self.prefix, 1)

    def add_parameters(self, model: nn.Module) -> None:
        named = [(self.stored(name), module) for name, module in model.named_modules()]
        model_of_files: Any = SimpleNamespace(named_modules=lambda: named)
        self.reader.add_parameters(model_of_files)

    @contextmanager
    def tensors_of(self, file: Path) -> Iterator["TextTensors"]:
        with self.reader.tensors_of(file) as tensors:
            yield TextTensors(tensors, self)


class TextTensors:
    """A file, as if it were that of a language model whose norms multiply by their weight."""

    def __init__(self, tensors: Any, reader: TextReader):
        self.tensors = tensors
        self.reader = reader

    def keys(self) -> list[str]:
        stored = self.tensors.keys()
        names = [name for name in stored if not name.startswith(SKIPPED)]
        return [name.replace(self.reader.prefix, SHORT) for name in names]

    def get_slice(self, name: str) -> Any:
        return self.tensors.get_slice(self.reader.stored(name))

    def get_tensor(self, name: str) -> Tensor:
        tensor = self.tensors.get_tensor(self.reader.stored(name))
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = 1 + tensor.float()
        order = self.reader.order
        if name.endswith(("q_norm.weight", "k_norm.weight")) and len(tensor) == len(order):
            tensor = tensor[order]  # as the heads are: see GatedAttention
        return tensor
