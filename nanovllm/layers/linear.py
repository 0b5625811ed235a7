"""Linear layers, and the rule by which a parameter is filled from a checkpoint."""

import torch
import torch.nn.functional as F
from torch import nn


def prepacked(weight: torch.Tensor) -> torch.Tensor:
    """The weight [out, in] as oneDNN wants it for products in bfloat16 on a CPU; elsewhere as it is."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return weight
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        torch.ops.mkldnn._linear_pointwise(weight[:1], packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):  # not in this build of PyTorch, or not for this CPU
        return weight
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, for a weight that may be prepacked."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class Linear(nn.Module):
    """y = x W^T + b with W [out, in].

    Several projections of the same input are one matrix: `parts` maps the name that each has in the
    checkpoint to its number of rows. `rows` is the loading rule: where each part belongs.
    """

    def __init__(self, in_features: int, parts: int | dict[str, int], bias: bool = False):
        super().__init__()
        self.rows: dict[str, slice] = {}
        out_features = parts if isinstance(parts, int) else 0
        for name, size in ({} if isinstance(parts, int) else parts).items():
            self.rows[name] = slice(out_features, out_features + size)
            out_features += size
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def prepack(self) -> None:
        """Once the weight is complete. A weight that stays as it is stays the same Parameter: it may be tied."""
        packed = prepacked(self.weight)
        if packed is not self.weight:
            self.weight = nn.Parameter(packed, requires_grad=False)
