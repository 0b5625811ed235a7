"""What a user changes in a model after its load: a recorded step does not see it (chapter 11)."""

import logging
from operator import attrgetter

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.modules import module as every_module

from nanovllm.layers.linear import Linear

logger = logging.getLogger(__name__)


class Counted(nn.Parameter):
    """A weight whose `_version` counts all changes. PyTorch does not count those through `data`."""

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        increment_version(self)


class Changes:
    """Compares the layers and weights of a model with those that it had when this was made. Every
    step does so: these are few calls, on lists that were made before."""

    def __init__(self, model: nn.Module):
        modules = [*model.modules()]
        self.hooks: list[dict] = [every_module._global_forward_hooks]
        self.hooks.append(every_module._global_forward_pre_hooks)
        self.hooks += [module._forward_hooks for module in modules]
        self.hooks += [module._forward_pre_hooks for module in modules]
        self.attributes = [*map(vars, modules)]
        self.classes = {*map(type, modules)}
        self.children = [module._modules for module in modules if module._modules]
        self.first_children = [*map(dict, self.children)]
        places = [(module._parameters, name) for module in modules for name in module._parameters]
        self.owners, self.names = zip(*places)
        self.weights = [*model.parameters()]
        for weight in self.weights:
            weight.__class__ = Counted
        linears = [module for module in modules if isinstance(module, Linear)]
        tensors = [one.quantized.scales for one in linears if one.quantized is not None]
        # a plain tensor that has the counter of a weight is read in half the time
        tensors += [weight.detach() for weight in self.weights]
        self.counters = [one for one in tensors if not one.is_inference()]  # these have none
        self.first_numbers = self._numbers()
        self.has_changed = False

    def _numbers(self) -> list[int]:
        """The identities of weights and functions, and how often each weight has changed."""
        weights = map(dict.get, self.owners, self.names)
        numbers = [*map(id, weights)]
        numbers += map(id, map(attrgetter("forward"), self.classes))
        numbers += map(len, self.attributes)  # `layer.forward = function` adds one
        numbers += map(attrgetter("_version"), self.counters)
        return numbers

    def found(self) -> bool:
        """Whether the model has changed, or has hooks. A change is never taken back."""
        is_same = self.children == self.first_children and self._numbers() == self.first_numbers
        if not (is_same or self.has_changed):
            self.has_changed = True
            logger.warning(
                "a layer or a weight has changed: decodes run layer by layer from now on"
            )
        return self.has_changed or any(self.hooks)
