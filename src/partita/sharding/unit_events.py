"""Calls of units in forward and backward, their events, and the graph positions of inputs and outputs.

A tensor's hooks belong to the autograd node that computed it. A view that is changed in place gets a new node, on top
of its base's: the old node of the view, with its hooks, is then no longer part of the graph, but that of its base is.
So :class:`Inputs` remembers the nodes of a forward's inputs, and :func:`on_gradient` registers hooks on bases, too.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partita.sharding.deferred import Deferred
from partita.sharding.unit import Unit

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


def _ignore(*args: object) -> None:
    pass


@dataclass(frozen=True)
class Subscriber:
    """The functions to call at the events of some units, in the order of subscription (where units close, in the
    reverse).

    ``opened`` before a unit's forward; ``closed`` after it, also where it failed, with whether it made a graph;
    ``opened_backward`` when the gradient of the unit's output has come; ``closed_backward`` when that of its input is
    complete, at the latest when the backward ends; ``backward_ended`` when none is under way any more.
    """

    opened: "Callable[[UnitCall], object]" = _ignore
    closed: "Callable[[UnitCall, bool], object]" = _ignore
    opened_backward: "Callable[[UnitCall], object]" = _ignore
    closed_backward: "Callable[[UnitCall], object]" = _ignore
    backward_ended: Callable[[], object] = _ignore

    @property
    def only_opens(self) -> bool:
        """True if nothing but ``opened`` is ever called."""
        return {self.closed, self.opened_backward, self.closed_backward, self.backward_ended} == {_ignore}


@dataclass(eq=False)
class FollowedUnit:
    """A unit, and who is told of its visits."""

    unit: Unit
    backwards: "Backwards"
    subscribers: list[Subscriber] = field(default_factory=list)


class UnitCall:
    """One forward through a unit whose graph may come back in backward.

    ``inputs`` are held while it runs; ``version`` is for the subscriber that watches for changed parameters. A graph's
    hooks hold a visit, so it holds nothing of the engine: a module may keep an output, with the graph, and no garbage
    collector sees through that.
    """

    def __init__(self, followed: FollowedUnit) -> None:
        self._followed = weakref.ref(followed)
        self.inputs = Inputs()
        self.version = 0
        self.in_backward = False

    @property
    def unit(self) -> Unit:
        return self._known.unit

    @property
    def subscribers(self) -> Sequence[Subscriber]:
        return self._known.subscribers

    @property
    def _known(self) -> FollowedUnit:
        followed = self._followed()
        assert followed is not None
        return followed

    def open_backward(self, _: Tensor) -> None:
        """A hook: the gradient of an output has come."""
        if (followed := self._followed()) is not None:  # the engine is there still
            followed.backwards.open(self)

    def close_backward(self, _: Tensor) -> None:
        """A hook: the gradient of an input is complete."""
        if (followed := self._followed()) is not None:
            followed.backwards.close(self)


class Backwards:
    """The backwards under way, and the visits that they have opened."""

    def __init__(self) -> None:
        self._opened: dict[int, list[UnitCall]] = {}

    def open(self, visit: UnitCall) -> None:
        """The gradient of a visit's output has come."""
        if visit.in_backward:
            return
        for subscriber in visit.subscribers:
            subscriber.opened_backward(visit)
        visit.in_backward = True
        task = torch._C._current_graph_task_id()
        if task not in self._opened:
            self._opened[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        self._opened[task].append(visit)

    def close(self, visit: UnitCall) -> None:
        """The gradient of a visit's input is complete."""
        if visit.in_backward:
            visit.in_backward = False
            for subscriber in reversed(visit.subscribers):
                subscriber.closed_backward(visit)

    def _end(self, task: int) -> None:
        visits = self._opened.pop(task, [])
        for visit in visits:
            self.close(visit)
        if not self._opened:
            for subscriber in {id(s): s for visit in visits for s in visit.subscribers}.values():
                subscriber.backward_ended()

    def forget(self) -> None:
        """Those that were under way have failed: nothing is closed for them any more."""
        self._opened.clear()
