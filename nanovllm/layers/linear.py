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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def prepack(self) -> None:
        """To be called once the weight is loaded: puts it into oneDNN's layout.

        Only for bfloat16 on a CPU. Otherwise it stays the same Parameter, since it may be tied.
        """
        weight = self.weight
        is_on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        if not is_on_cpu or weight.dtype != torch.bfloat16:
            return
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            torch.ops.mkldnn._linear_pointwise(weight[:1], packed, None, "none", [], "")
        except (AttributeError, NotImplementedError, RuntimeError):
            return  # not in this PyTorch, or not on this CPU
        self.weight = nn.Parameter(packed, requires_grad=False)
