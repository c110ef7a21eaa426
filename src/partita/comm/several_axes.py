"""The ranks along several axes, reached over one group after the other: without process groups of their own."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from partita.comm.collectives import Collectives
from partita.plan.mesh_shape import AXES


class SeveralAxes:
    """Rare messages among the ranks along several axes, of which there is a group for each part.

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
        """Return whole axes of the mesh, one after the other."""
        return cls(collectives, [(axis,) for axis in AXES if axis in axes])

    @property
    def is_first(self) -> bool:
        """True on the first of the ranks."""
        return all(group.index == 0 for group in self.groups)

    @property
    def ranks(self) -> Sequence[int]:
        """The mesh's numbers of the ranks, in order."""
        return next(ranks for ranks in self._mesh.shape.groups(self.axes) if self._mesh.rank in ranks)

    def exchange_objects(self, value: object, call: str) -> list[Any]:
        """Return every rank's ``value``, in the order of the parts; ``call`` as in :meth:`Group.exchange`."""
        values: list[Any] = [value]
        for group in reversed(self.groups):  # from the innermost part on
            values = [each for of_rank in group.exchange_objects(values, call) for each in of_rank]
        return values

    def broadcast(self, tensors: Sequence[Tensor], purpose: str) -> None:
        """Overwrite ``tensors`` with those of the first rank. Each group's turn is among its other messages."""
        for group in self.groups:
            group.broadcast(tensors, purpose)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place."""
        for group in self.groups:
            group.all_reduce(tensor)
        return tensor
