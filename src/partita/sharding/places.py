"""Positions in autograd's graph, which stay the same when a tensor is changed in place afterwards.

A tensor's hooks belong to the node that computed it. A view that is changed in place gets a new node, on top of its
base's: the old node of the view, with its hooks, is then no longer part of the graph, but that of its base is.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.sharding.deferred import Deferred

GradientHook = Callable[[Any], object]


@dataclass(frozen=True)
class _Place:
    """A tensor (an input, or the base of one), and the node that had computed it when a forward began."""

    tensor: Tensor
    node: Any


class Inputs:
    """The inputs of a forward, and where they were in autograd's graph when it began."""

    def __init__(self) -> None:
        self._inputs = list[_Place]()
        self._bases = list[_Place]()
        self._nodes = dict[int, Any]()  # by the ids of these tensors

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Remember the tensors that a forward is given."""
        with torch._C.DisableTorchFunctionSubclass():
            self._inputs = [_Place(tensor, tensor.grad_fn) for tensor in tensors]
            bases = (tensor._base for tensor in (place.tensor for place in self._inputs))
            self._bases = [_Place(base, base.grad_fn) for base in bases if base is not None]
            self._nodes = {id(place.tensor): place.node for place in (*self._bases, *self._inputs)}

    def clear(self) -> None:
        """Forget the tensors: the forward has ended."""
        self._inputs = []
        self._bases = []
        self._nodes = {}

    def has(self, tensor: Tensor) -> bool:
        """True if this tensor was given to the forward (or is the base of an input) and has not been changed since."""
        return id(tensor) in self._nodes and self._nodes[id(tensor)] is tensor.grad_fn

    def on_gradients(self, hook: GradientHook) -> None:
        """Call ``hook`` whenever the gradient of an input is complete.

        A leaf's gradient is accumulated as soon as it is ready, before the rest of the forward's graph has run: leaves
        have no hook. An input that was changed in place has its gradient when that of its values before is complete.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for place in self._inputs:
                if self.has(place.tensor):
                    if place.node is not None:
                        place.tensor.register_hook(hook)
                    continue
                base = place.tensor._base
                node = place.node if base is None else self._nodes.get(id(base))
                if node is not None:
                    node.register_prehook(hook)


def on_gradient(tensor: Tensor, hook: GradientHook, inputs: Inputs) -> bool:
    """Call ``hook`` when the gradient of a forward's output has come, also if the output is changed in place later.

    Returns: True if the forward may have computed the output. Unchanged inputs and leaves get no hook.
    """
    if isinstance(tensor, Deferred):
        are_computed = [on_gradient(source, hook, inputs) for source in tensor.sources]
        return any(are_computed)
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.requires_grad or tensor.is_leaf or inputs.has(tensor):
            return False
        tensor.register_hook(hook)
        base = tensor._base
        if base is not None and not base.is_leaf and not inputs.has(base):
            base.register_hook(hook)
    return True
