"""Linear layers, and the rule for loading their parameters from a checkpoint."""

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """y = x W^T + b with W [out, in].

    Several projections of the same input form one matrix: `parts` maps the name of each in the
    checkpoint to its number of rows. `part_slices` is the loading rule: which rows each part fills.
    """

    def __init__(
        self,
        in_features: int,
        parts: int | dict[str, int],
        dtype: torch.dtype,
        bias: bool = False,
    ):
        super().__init__()
        self.part_slices: dict[str, slice] = {}
        if isinstance(parts, int):
            out_features = parts
        else:
            out_features = 0
            for name, size in parts.items():
                self.part_slices[name] = slice(out_features, out_features + size)
                out_features += size
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None
        self.by_onednn = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_onednn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def prepare_for_cpu(self, is_tied: bool) -> None:
        """Lets oneDNN compute the product where it is faster. Call it once the weight is loaded.

        Only what is known before decides, so that the same model always rounds in the same way. The
        weight goes into oneDNN's layout, unless it `is_tied`: in float32 a plain one will do; in
        bfloat16 it would take 4 times as long, so there the head gets a second, packed copy.
        """
        weight = self.weight
        is_float32 = weight.dtype == torch.float32
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return
        if not ((is_float32 and has_vectors()) or weight.dtype == torch.bfloat16):
            return
        try:
            if not (is_tied and is_float32):
                weight = torch.ops.mkldnn._reorder_linear_weight(weight)
            torch.ops.mkldnn._linear_pointwise(self.weight[:1], weight, None, "none", [], "")
        except (AttributeError, NotImplementedError, RuntimeError):
            return  # not in this PyTorch, or not on this CPU
        self.by_onednn = True
        if weight is not self.weight:
            self.weight = nn.Parameter(weight, requires_grad=False)


def has_vectors() -> bool:
    """Without AVX2, oneDNN multiplies float32 at a third of the speed of PyTorch's own library."""
    return torch.backends.cpu.get_cpu_capability() != "DEFAULT"
