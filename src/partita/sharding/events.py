"""Events of units: opened and closed, in forward and in backward; at every stage, for whoever subscribes to them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partita.sharding.unit import Unit


@dataclass(eq=False)
class Visit:
    """One forward through a unit whose graph may come back in backward.

    ``inputs`` are held while it runs; ``version`` is for the subscriber that watches for changed parameters.
    """

    unit: Unit
    version: int = 0
    in_backward: bool = False
    inputs: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Subscriber:
    """What is called at the events of some units, in the order of subscription (where units close, in the reverse).

    ``opened`` before a unit's forward; ``closed`` after it, also where it failed, with whether it made a graph;
    ``opened_backward`` when the gradient of the unit's output has come; ``closed_backward`` when that of its input is
    complete, at the latest when the backward ends; ``backward_ended`` when none is under way any more.
    """

    opened: Callable[[Visit], object] | None = None
    closed: Callable[[Visit, bool], object] | None = None
    opened_backward: Callable[[Visit], object] | None = None
    closed_backward: Callable[[Visit], object] | None = None
    backward_ended: Callable[[], object] | None = None

    @property
    def only_opens(self) -> bool:
        """Whether it is enough to be called before forwards."""
        return not (self.closed or self.opened_backward or self.closed_backward or self.backward_ended)


class Backwards:
    """The backwards under way, and what they have opened."""

    def __init__(self) -> None:
        self._opened: dict[int, list[tuple[Visit, list[Subscriber]]]] = {}

    def open(self, visit: Visit, subscribers: list[Subscriber]) -> None:
        """The gradient of a visit's output has come."""
        if visit.in_backward:
            return
        for subscriber in subscribers:
            if subscriber.opened_backward is not None:
                subscriber.opened_backward(visit)
        visit.in_backward = True
        task = torch._C._current_graph_task_id()
        if task not in self._opened:
            self._opened[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        self._opened[task].append((visit, subscribers))

    def close(self, visit: Visit, subscribers: list[Subscriber]) -> None:
        """The gradient of a visit's input is complete."""
        if visit.in_backward:
            visit.in_backward = False
            for subscriber in reversed(subscribers):
                if subscriber.closed_backward is not None:
                    subscriber.closed_backward(visit)

    def _end(self, task: int) -> None:
        ended = self._opened.pop(task, [])
        for visit, subscribers in ended:
            self.close(visit, subscribers)
        if not self._opened:
            told = {id(subscriber): subscriber for _, subscribers in ended for subscriber in subscribers}
            for subscriber in told.values():
                if subscriber.backward_ended is not None:
                    subscriber.backward_ended()

    def forget(self) -> None:
        """Those that were under way have failed."""
        self._opened.clear()
