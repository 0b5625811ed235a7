"""Methods: how a checkpoint says that its weights are quantized, and which ways are supported."""

from typing import Any, NamedTuple

from nanovllm.options import shown
from nanovllm.topics.quantization.groups import SIZES

BLOCK = 128  # of FP8: a scale for 128 x 128 numbers
ALLOWED: dict[str, dict[str, tuple]] = {  # of a method: its settings
    "gptq": {
        "bits": (4, 8),
        "group_size": SIZES,
        "checkpoint_format": ("gptq", "gptq_v2", None),
    },
    "awq": {"bits": (4,), "group_size": SIZES, "version": ("gemm", None)},
    "fp8": {"weight_block_size": ([BLOCK, BLOCK],)},
}
SUPPORTED = "gptq, awq and fp8 are; or use the model's unquantized checkpoint"


class Method(NamedTuple):
    """How the weights of a checkpoint are quantized."""

    name: str
    bits: int
    group: int
    is_shifted: bool  # whether a stored zero is one less than the zero, as in GPTQ's first format
    is_symmetric: bool  # whether each zero is 2 ** (bits - 1), whatever is stored

    @property
    def has_codes(self) -> bool:
        """Whether weights stay codes. FP8 becomes ordinary numbers."""
        return self.name != "fp8"


def method_of(hf_config) -> Method | None:
    """The method in a model's Hugging Face config, if it has one. Raises ValueError if the method
    is not supported."""
    stored: dict[str, Any] = dict(getattr(hf_config, "quantization_config", None) or {})
    if not stored:
        return None
    if "quant_method" not in stored:
        no_method = "quantization_config has no quant_method (are the files for MLX?)"
        raise ValueError(f"{no_method}: {SUPPORTED}")
    method = str(stored["quant_method"]).lower()
    if method not in ALLOWED:
        raise ValueError(f"quantization by {method!r} is not supported: {SUPPORTED}")
    form = stored.get("format")  # as some tools name it
    settings = with_allowed(method, {"checkpoint_format": form} | stored)
    is_gptq = method == "gptq"
    return Method(
        method,
        settings.get("bits", 8),
        settings.get("group_size", BLOCK),
        is_shifted=is_gptq and settings["checkpoint_format"] != "gptq_v2",
        is_symmetric=is_gptq and stored.get("sym") is True,
    )


def with_allowed(name: str, stored: dict[str, Any]) -> dict[str, Any]:
    """The settings of a method as ALLOWED has them. Raises ValueError for any other value."""
    settings = {}
    for field, values in ALLOWED[name].items():
        value = stored.get(field)
        known = value.lower() if isinstance(value, str) else value
        if known not in values:
            found = f"quantization by {name!r} with {field}={shown(value)}"
            raise ValueError(f"{found} is not supported: it must be one of {values}")
        settings[field] = values[values.index(known)]  # 4 for 4.0
    return settings
