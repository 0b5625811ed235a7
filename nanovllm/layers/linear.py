"""Linear layers, and the rule for loading their parameters from a checkpoint."""

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """y = x W^T + b with W [out, in].

    Several projections of the same input form one matrix: `parts` maps the name of each in the
    checkpoint to its number of rows. `part_slices` is the loading rule: which rows each part fills.
    """

    def __init__(self, in_features: int, parts: int | dict[str, int], bias: bool = False):
        super().__init__()
        self.part_slices: dict[str, slice] = {}
        if isinstance(parts, int):
            out_features = parts
        else:
            out_features = 0
            for name, size in parts.items():
                self.part_slices[name] = slice(out_features, out_features + size)
                out_features += size
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.by_onednn = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_onednn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def prepare_for_cpu(self) -> None:
        """Lets oneDNN compute the product where it is faster. Call it once the weight is loaded.

        The dtype and the instruction set decide, not a measurement: the same model must always
        round in the same way. The weight goes into oneDNN's layout, and a head that is tied to the
        embedding becomes a second tensor. With a plain weight, oneDNN sums up a single row in
        another order than several, and is up to 4 times as slow in bfloat16.
        """
        if self.weight.device.type != "cpu" or not onednn_is_faster(self.weight.dtype):
            return
        try:
            weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            torch.ops.mkldnn._linear_pointwise(self.weight[:1], weight, None, "none", [], "")
        except (AttributeError, RuntimeError):
            return  # not in this PyTorch, or not on this CPU
        self.by_onednn = True
        self.weight = nn.Parameter(weight, requires_grad=False)


def onednn_is_faster(dtype: torch.dtype) -> bool:
    """Whether oneDNN is faster: in float32 without AVX2 it takes three times as long as PyTorch."""
    if dtype == torch.float32:
        return torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    return dtype == torch.bfloat16
