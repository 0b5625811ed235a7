"""What a user changes in a model after its load: a recorded step does not see it (chapter 11)."""

import logging
from itertools import chain
from operator import attrgetter

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.modules import module as every_module

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
    """Compares the layers and weights of a model with those that it had when this was made. Each
    step does so, in few calls."""

    def __init__(self, model: nn.Module):
        modules = [*model.modules()]
        weights = [*model.parameters()]
        for weight in weights:
            weight.__class__ = Counted
        # a plain tensor that has the counter of a weight is read in half the time
        self.counters = [weight.detach() for weight in weights if not weight.is_inference()]
        self.classes = {*map(type, modules)}
        self.attributes = [*map(vars, modules)]
        hooks = every_module._global_forward_hooks, every_module._global_forward_pre_hooks
        self.hooks: list[dict] = [*hooks]
        self.members: list[dict] = []
        for module in modules:
            self.hooks += [module._forward_hooks, module._forward_pre_hooks]
            self.members += filter(None, [module._modules, module._parameters])
        self.kept = modules, weights  # or another one could get the identity of one of them
        self.at_start = self._numbers()
        self.has_changed = False

    def _numbers(self) -> list[int]:
        """The identities of layers, weights and functions, and how often each weight changed."""
        parts = chain.from_iterable(map(dict.values, self.members))
        forwards = map(attrgetter("forward"), self.classes)
        numbers = [*map(id, chain(parts, forwards))]
        numbers += map(len, self.attributes)  # `layer.forward = function` adds one
        numbers += map(attrgetter("_version"), self.counters)
        return numbers

    def found(self) -> bool:
        """Whether the model has changed, or has hooks. A change is never taken back."""
        if not self.has_changed and self._numbers() != self.at_start:
            self.has_changed = True
            logger.warning("a layer or weight has changed: decodes run layer by layer from now on")
        return self.has_changed or any(self.hooks)
