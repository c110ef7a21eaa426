"""Messages among the ranks along several axes, sent over one group after the other, without a process group of all."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from partita.comm.collectives import Collectives
from partita.table.mesh_shape import AXES


class SeveralAxes:
    """Rare messages among the ranks along several axes, composed of a group for each entry of ``parts``.

    Args:
        parts: the axes of these groups, the outermost first.
    """

    def __init__(self, collectives: Collectives, parts: Sequence[tuple[str, ...]]) -> None:
        shape = collectives.mesh.shape
        self._mesh = collectives.mesh
        self.axes = shape.named(tuple(axis for axes in parts for axis in axes))
        self.groups = [group for axes in parts if (group := collectives.group(axes)).size > 1]
        self.size = math.prod(group.size for group in self.groups)

    @classmethod
    def of(cls, collectives: Collectives, axes: tuple[str, ...]) -> "SeveralAxes":
        """Return the combination of these axes, with one group per axis of the mesh."""
        return cls(collectives, [(axis,) for axis in AXES if axis in axes])

    @property
    def is_first(self) -> bool:
        """True on the first of the ranks."""
        return all(group.index == 0 for group in self.groups)

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks, in order."""
        return next(ranks for ranks in self._mesh.shape.groups(self.axes) if self._mesh.rank in ranks)

    def exchange_objects(self, value: object, call: str) -> list[Any]:
        """All-gather a Python value, in the order of ``parts``; ``call`` as in :meth:`Group.exchange`."""
        values: list[Any] = [value]
        for group in reversed(self.groups):  # innermost first
            values = [each for of_rank in group.exchange_objects(values, call) for each in of_rank]
        return values

    def broadcast(self, tensors: Sequence[Tensor], purpose: str) -> None:
        """Broadcast ``tensors`` from the first rank. In each group this is in order with its other messages."""
        for group in self.groups:
            group.broadcast(tensors, purpose)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place."""
        for group in self.groups:
            group.all_reduce(tensor)
        return tensor
