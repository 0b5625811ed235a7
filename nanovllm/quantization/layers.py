"""Weights change their form while a model loads: layer by layer, so only one has both forms."""

import ctypes
import re
from collections.abc import Callable, Collection

from nanovllm.config import Config
from nanovllm.device.onednn import use_onednn
from nanovllm.layers.linear import Linear
from nanovllm.models.qwen import Qwen
from nanovllm.quantization.int8 import use_int8

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def choose_product(config: Config) -> Callable[[Linear], None]:
    """What gives a linear layer, once its weight is loaded, its form on this machine."""
    return use_int8 if config.quantization == "int8" else use_onednn


def prepare_layer(
    model: Qwen,
    name: str,
    missing: Collection[str],
    prepare: Callable[[Linear], None],
) -> None:
    """Prepares the linear layers of a decoder layer, if `name` was the last of its tensors; and the
    head, if it was the last of all."""
    if not missing:
        prepare(model.lm_head)
    layer = LAYER.match(name)
    if layer is None or any(other.startswith(layer[0]) for other in missing):
        return
    for module in model.model.layers[int(layer[1])].modules():
        if isinstance(module, Linear):
            prepare(module)
    if hasattr(ctypes.pythonapi, "malloc_trim"):
        ctypes.pythonapi.malloc_trim(0)  # glibc would keep the memory of the first form
