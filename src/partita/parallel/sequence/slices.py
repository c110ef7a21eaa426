"""Division of a sequence over the ranks of a group."""

from dataclasses import dataclass

from torch import Tensor

from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.table.place import even


@dataclass(frozen=True)
class Slices:
    """The slices of a sequence: each rank of ``group`` has the positions ``[start, stop)`` of its entry in ``ranges``.

    The ranges are adjacent; some may be empty.
    """

    ranges: tuple[tuple[int, int], ...]
    group: Group
    mesh: Mesh

    @staticmethod
    def even(length: int, group: Group, mesh: Mesh) -> "Slices":
        """Divide ``length`` positions evenly. If that leaves a remainder, the first ranks have one more position."""
        return Slices(tuple(even(length, group.size)), group, mesh)

    def within(self, start: int, stop: int) -> "Slices":
        """Return the slices of the positions ``[start, stop)`` only, counted from ``start``."""
        clipped = tuple(tuple(min(max(at, start), stop) - start for at in places) for places in self.ranges)
        return Slices(clipped, self.group, self.mesh)  # type: ignore[arg-type]

    @property
    def length(self) -> int:
        return self.ranges[-1][1]

    @property
    def own(self) -> slice:
        """This rank's positions."""
        return slice(*self.ranges[self.group.index])

    @property
    def num_own(self) -> int:
        start, stop = self.ranges[self.group.index]
        return stop - start

    def shapes(self, tensor: Tensor, dim: int) -> list[list[int]]:
        """Return the shape of each rank's slice along ``dim`` of a tensor with the other dims of ``tensor``."""
        sizes = list(tensor.shape)
        return [[*sizes[:dim], stop - start, *sizes[dim + 1 :]] for start, stop in self.ranges]

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of a tensor that has all positions along ``dim``."""
        return whole.narrow(dim, self.own.start, self.num_own)

    def split(self, whole: Tensor, dim: int) -> list[Tensor]:
        """Return each rank's slice of a tensor that has all positions along ``dim``."""
        return [whole.narrow(dim, start, stop - start) for start, stop in self.ranges]
