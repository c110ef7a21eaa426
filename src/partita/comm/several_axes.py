"""The ranks along several axes, reached along one axis after the other: without process groups of their own."""

from typing import Any

from partita.comm.collectives import Collectives
from partita.plan.mesh_shape import AXES


class SeveralAxes:
    """For rare control messages. ``axes`` are whole axes of the mesh; ``size`` ranks differ only along them."""

    def __init__(self, collectives: Collectives, axes: tuple[str, ...]) -> None:
        shape = collectives.mesh.shape
        self.axes = shape.named(axes)
        self.size = shape.group_size(axes)
        self._groups = [collectives.group((axis,)) for axis in reversed(AXES) if axis in axes and shape.size(axis) > 1]

    def exchange_objects(self, value: object, call: str) -> list[Any]:
        """Every rank's ``value``, in the mesh's order; ``call`` as in :meth:`Group.exchange`."""
        values: list[Any] = [value]
        for group in self._groups:  # from the innermost axis on
            values = [each for of_rank in group.exchange_objects(values, call) for each in of_rank]
        return values
