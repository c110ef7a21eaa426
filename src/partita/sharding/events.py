"""Events of units: opened and closed, in forward and in backward; at every stage, for whoever subscribes to them."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partita.sharding.places import Inputs
from partita.sharding.unit import Unit


def _ignore(*args: object) -> None:
    pass


@dataclass(frozen=True)
class Subscriber:
    """What is called at the events of some units, in the order of subscription (where units close, in the reverse).

    ``opened`` before a unit's forward; ``closed`` after it, also where it failed, with whether it made a graph;
    ``opened_backward`` when the gradient of the unit's output has come; ``closed_backward`` when that of its input is
    complete, at the latest when the backward ends; ``backward_ended`` when none is under way any more.
    """

    opened: "Callable[[Visit], object]" = _ignore
    closed: "Callable[[Visit, bool], object]" = _ignore
    opened_backward: "Callable[[Visit], object]" = _ignore
    closed_backward: "Callable[[Visit], object]" = _ignore
    backward_ended: Callable[[], object] = _ignore

    @property
    def only_opens(self) -> bool:
        """Whether nothing but ``opened`` is ever called."""
        return {self.closed, self.opened_backward, self.closed_backward, self.backward_ended} == {_ignore}


@dataclass(eq=False)
class FollowedUnit:
    """A unit, and who is told of its visits."""

    unit: Unit
    backwards: "Backwards"
    subscribers: list[Subscriber] = field(default_factory=list)


class Visit:
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
        self._opened: dict[int, list[Visit]] = {}

    def open(self, visit: Visit) -> None:
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

    def close(self, visit: Visit) -> None:
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
