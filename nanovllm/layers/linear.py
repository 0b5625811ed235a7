"""Linear layers, and the rule by which a parameter is filled from a checkpoint."""

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """y = x W^T + b with W [out, in].

    Several projections of the same input are one matrix: `parts` maps the name that each has in the
    checkpoint to its number of rows. `part_slices` is the loading rule: where each part belongs.
    """

    def __init__(self, in_features: int, parts: int | dict[str, int], bias: bool = False):
        super().__init__()
        self.part_slices: dict[str, slice] = {}
        out_features = parts if isinstance(parts, int) else 0
        for name, size in ({} if isinstance(parts, int) else parts).items():
            self.part_slices[name] = slice(out_features, out_features + size)
            out_features += size
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def prepack(self) -> None:
        """Once the weight is complete: as oneDNN wants it for products in bfloat16 on a CPU. Elsewhere it stays the same
        Parameter, which may be tied."""
        weight = self.weight
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
            try:
                packed = torch.ops.mkldnn._reorder_linear_weight(weight)
                torch.ops.mkldnn._linear_pointwise(weight[:1], packed, None, "none", [], "")
            except (AttributeError, NotImplementedError, RuntimeError):  # not in this PyTorch, or not for this CPU
                return
            self.weight = nn.Parameter(packed, requires_grad=False)
