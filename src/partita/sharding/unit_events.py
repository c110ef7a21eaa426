"""Calls of units in forward and backward, their events, and the autograd nodes of inputs and outputs.

A tensor's hooks belong to the autograd node that computed it. A view that is changed in place gets a new node, on top
of its base's. The view's old node, with its hooks, then leaves the graph, but the node of its base does not. So
:class:`Inputs` remembers the nodes of a forward's inputs, and :func:`on_gradient` registers hooks on bases, too.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from partita.sharding.deferred import Deferred
from partita.sharding.unit import Unit

GradientHook = Callable[[Any], object]


@dataclass(frozen=True)
class _Place:
    """A tensor (an input, or the base of one), and its autograd node when a forward began."""

    tensor: Tensor
    node: Any


class Inputs:
    """The inputs of a forward, and their autograd nodes when it began."""

    def __init__(self) -> None:
        self._inputs = list[_Place]()
        self._bases = list[_Place]()
        self._nodes = dict[int, Any]()  # by the ids of these tensors

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Remember the inputs of a forward."""
        with torch._C.DisableTorchFunctionSubclass():
            self._inputs = [_Place(tensor, tensor.grad_fn) for tensor in tensors]
            bases = (tensor._base for tensor in (place.tensor for place in self._inputs))
            self._bases = [_Place(base, base.grad_fn) for base in bases if base is not None]
            self._nodes = {id(place.tensor): place.node for place in (*self._bases, *self._inputs)}

    def clear(self) -> None:
        """Forget the inputs at the end of the forward."""
        self._inputs = []
        self._bases = []
        self._nodes = {}

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an input of the forward, or the base of one, and has not been changed since."""
        return id(tensor) in self._nodes and self._nodes[id(tensor)] is tensor.grad_fn

    def on_gradients(self, hook: GradientHook) -> None:
        """Call ``hook`` whenever the gradient of an input is complete.

        Leaves get no hook: their gradient is accumulated as soon as it is ready, before the remaining graph has run.
        The gradient of an input that was changed in place is complete when that of its earlier values is.
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


def levels(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, and those that it wraps inside transforms of ``torch.func``; the plain one is last."""
    yield tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        yield tensor


def on_gradient(tensor: Tensor, hook: GradientHook, inputs: Inputs) -> bool:
    """Call ``hook`` when the gradient of a forward's output arrives, also if the output is changed in place later.

    Returns: True if the forward may have computed the output. Unchanged inputs and leaves get no hook.
    """
    if isinstance(tensor, Deferred):
        are_computed = [on_gradient(source, hook, inputs) for source in tensor.sources]
        return any(are_computed)
    if forward_ad._current_level >= 0 or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tangent = forward_ad.unpack_dual(tensor).tangent if forward_ad._current_level >= 0 else None
        tensors = [*levels(tensor), *(() if tangent is None else levels(tangent))]
        are_computed = [_on_own_gradient(each, hook, inputs) for each in tensors]
        return any(are_computed)
    return _on_own_gradient(tensor, hook, inputs)


def _on_own_gradient(tensor: Tensor, hook: GradientHook, inputs: Inputs) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.requires_grad or tensor.is_leaf or inputs.has(tensor):
            return False
        tensor.register_hook(hook)
        base = tensor._base
        if base is not None and not base.is_leaf and not inputs.has(base):
            base.register_hook(hook)
    return True


def _ignore(*args: object) -> None:
    pass


@dataclass(frozen=True)
class Subscriber:
    """The functions to call at the events of some units, in the order of subscription (reversed for ``closed``).

    Attributes:
        opened: called before a unit's forward.
        closed: called after it, even if it failed, with True if it has created a graph.
        opened_backward: called when the gradient of the unit's output arrives.
        closed_backward: called when the gradient of its input is complete, at the latest when the backward ends.
        backward_ended: called when no backward is running any more.
    """

    opened: "Callable[[UnitCall], object]" = _ignore
    closed: "Callable[[UnitCall, bool], object]" = _ignore
    opened_backward: "Callable[[UnitCall], object]" = _ignore
    closed_backward: "Callable[[UnitCall], object]" = _ignore
    backward_ended: Callable[[], object] = _ignore

    @property
    def only_opens(self) -> bool:
        """True if only ``opened`` is set."""
        return {self.closed, self.opened_backward, self.closed_backward, self.backward_ended} == {_ignore}


@dataclass(eq=False)
class FollowedUnit:
    """A unit and its subscribers."""

    unit: Unit
    backwards: "Backwards"
    subscribers: list[Subscriber] = field(default_factory=list)


class UnitCall:
    """One forward of a unit, and the backward through its graph.

    ``inputs`` are kept while the forward runs; ``version`` is set by the subscriber that checks for changed parameters.
    A graph's hooks refer to this object, so it has only weak references to the engine: a module may keep an output with
    its graph, and the garbage collector cannot follow references through a graph.
    """

    def __init__(self, followed: FollowedUnit) -> None:
        self._followed = weakref.ref(followed)
        self.inputs = Inputs()
        self.version = 0
        self.in_backward = False

    @property
    def unit(self) -> Unit:
        return self._living.unit

    @property
    def subscribers(self) -> Sequence[Subscriber]:
        return self._living.subscribers

    @property
    def _living(self) -> FollowedUnit:
        followed = self._followed()
        assert followed is not None
        return followed

    def open_backward(self, _: Tensor) -> None:
        """Hook for the gradient of an output."""
        if (followed := self._followed()) is not None:  # the engine still exists
            followed.backwards.open(self)

    def close_backward(self, _: Tensor) -> None:
        """Hook for the complete gradient of an input."""
        if (followed := self._followed()) is not None:
            followed.backwards.close(self)


class Backwards:
    """The running backwards, and the unit calls that they have reached."""

    def __init__(self) -> None:
        self._opened: dict[int, list[UnitCall]] = {}

    def open(self, call: UnitCall) -> None:
        """Handle the gradient of a call's output."""
        if call.in_backward:
            return
        for subscriber in call.subscribers:
            subscriber.opened_backward(call)
        call.in_backward = True
        task = torch._C._current_graph_task_id()
        if task not in self._opened:
            self._opened[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        self._opened[task].append(call)

    def close(self, call: UnitCall) -> None:
        """Handle the complete gradient of a call's input."""
        if call.in_backward:
            call.in_backward = False
            for subscriber in reversed(call.subscribers):
                subscriber.closed_backward(call)

    def _end(self, task: int) -> None:
        calls = self._opened.pop(task, [])
        for call in calls:
            self.close(call)
        if not self._opened:
            for subscriber in {id(s): s for call in calls for s in call.subscribers}.values():
                subscriber.backward_ended()

    def forget(self) -> None:
        """Forget backwards that have failed, without closing their calls."""
        self._opened.clear()
