"""Update rules: how an optimizer is given one parameter's weights and gradient, and what it writes.

:class:`TorchRule` is that of any ``torch.optim.Optimizer``, which finds its gradient in ``.grad``.
:class:`KernelRule` is that of the optimizers whose update is one kernel, which also undoes the loss scale, clips, and
writes 16-bit parameters.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from partita.kernels.state import Weights
from partita.optim.fused import FusedOptimizer, Operands, flat
from partita.optim.views import View
from partita.plan.residence import FP32
from partita.sharding.unit import Segment

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@dataclass(frozen=True)
class InMemory:
    """The weights of this rank's part of a segment, in memory for one update.

    Attributes:
        master: the master weights; of split ones the low bits.
        param: the 16-bit parameters, where the rule writes them; of split masters their high bits.
        is_split: the master weights are split.
    """

    master: Tensor
    param: Tensor | None
    is_split: bool

    def of(self, view: View) -> Weights:
        """Return one parameter's weights, flat."""
        master = flat(view.over(self.master))
        param = None if self.param is None else flat(view.over(self.param))
        return Weights(param=param, low=master) if self.is_split else Weights(param=param, master=master)


class UpdateRule(ABC, Generic[OptimizerT]):
    """How an optimizer updates the parameters of a segment.

    Attributes:
        runs_beside: updates run beside the caller on every device, not only where states are off the device.
    """

    runs_beside = False

    def __init__(self, optimizer: OptimizerT) -> None:
        self.optimizer = optimizer

    @abstractmethod
    def writes_param(self, segment: Segment) -> bool:
        """Return whether the update writes the parameters in compute, beside the master weights."""

    @abstractmethod
    def connect(self, view: View, grad: Tensor, factor: float, weights: InMemory) -> None:
        """Give the optimizer one parameter's gradient, to be multiplied by ``factor``, and its weights."""

    @abstractmethod
    def disconnect(self) -> None:
        """The optimizer has stepped: forget what it was given."""


class TorchRule(UpdateRule[Optimizer]):
    """An optimizer of torch, or the user's."""

    def writes_param(self, segment: Segment) -> bool:
        return False

    def connect(self, view: View, grad: Tensor, factor: float, weights: InMemory) -> None:
        if factor != 1.0:
            grad.mul_(factor)
        view.tensor.grad = grad.to(view.tensor.device, view.tensor.dtype)

    def disconnect(self) -> None:
        pass  # gradients are taken out of the views


class KernelRule(UpdateRule[FusedOptimizer]):
    """An optimizer whose update is one kernel (:mod:`partita.optim.fused`)."""

    runs_beside = True

    def writes_param(self, segment: Segment) -> bool:
        return segment.layout.encoding != FP32

    def connect(self, view: View, grad: Tensor, factor: float, weights: InMemory) -> None:
        own = weights.of(view)
        flat_grad = view.member.flat(grad) if view.member.segment.holds_whole_master else grad
        self.optimizer.operands[view.tensor] = Operands(own, flat_grad.to(own.like.device), factor)

    def disconnect(self) -> None:
        self.optimizer.operands.clear()


def rule_for(optimizer: Optimizer) -> UpdateRule[FusedOptimizer] | UpdateRule[Optimizer]:
    """Return the rule of an optimizer."""
    return KernelRule(optimizer) if isinstance(optimizer, FusedOptimizer) else TorchRule(optimizer)
