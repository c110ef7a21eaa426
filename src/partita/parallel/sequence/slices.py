"""How a sequence is cut over the ranks of a group."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.errors import PartitaError
from partita.plan.place import even


@dataclass(frozen=True)
class Slices:
    """A sequence of ``length`` positions, cut over the ranks of ``group`` on a ``mesh``; the first have one more where
    they do not divide it.

    Raises:
        PartitaError: there are fewer positions than ranks.
    """

    length: int
    group: Group
    mesh: Mesh

    def __post_init__(self) -> None:
        if self.length < self.group.size:
            raise PartitaError(
                f"a sequence of {self.length} positions cannot be cut over parallel.sequence: {self.group.size} ranks; "
                "use longer sequences (pad them), or set parallel.sequence to at most their length. (Text is generated "
                "token by token on a whole model: after engine.close(whole=True))"
            )

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """``[start, stop)`` of each rank's positions."""
        return tuple(even(self.length, self.group.size))

    @property
    def own(self) -> slice:
        """This rank's positions."""
        return slice(*self.ranges[self.group.index])

    @property
    def num_own(self) -> int:
        start, stop = self.ranges[self.group.index]
        return stop - start

    def shapes(self, tensor: Tensor, dim: int) -> list[list[int]]:
        """Of each rank's slice of a tensor along ``dim``, of any length there."""
        sizes = list(tensor.shape)
        return [[*sizes[:dim], stop - start, *sizes[dim + 1 :]] for start, stop in self.ranges]

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's slice of a tensor that has all positions along ``dim``."""
        return whole.narrow(dim, self.own.start, self.num_own)

    def cut(self, whole: Tensor, dim: int) -> list[Tensor]:
        """Each rank's slice of a tensor that has all positions along ``dim``."""
        return [whole.narrow(dim, start, stop - start) for start, stop in self.ranges]
