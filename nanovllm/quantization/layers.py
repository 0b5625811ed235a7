"""Weights change their form while a model loads: layer by layer, so only one has both forms."""

import re
from collections.abc import Callable, Collection

from nanovllm.layers.linear import Linear
from nanovllm.models.qwen import Qwen

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def prepare_layer(
    model: Qwen,
    name: str,
    missing: Collection[str],
    prepare: Callable[[Linear], None],
) -> None:
    """Prepares the linear layers of a decoder layer, if `name` was the last of its tensors."""
    layer = LAYER.match(name)
    if layer is None or any(other.startswith(layer[0]) for other in missing):
        return
    for module in model.model.layers[int(layer[1])].modules():
        if isinstance(module, Linear):
            prepare(module)
