"""Communication formats: the encodings of values in all-gathers and reduce-scatters."""

from abc import ABC, abstractmethod

from partita.table.mesh_shape import MeshShape
from partita.table.residence import Encoding


class Format(ABC):
    """A communication format. The core sends values uncompressed (:data:`FULL`); optional packages add other formats.

    Subclasses are immutable and comparable: rows of the table that use equal formats are equal.
    """

    is_exact = False  # True if receivers get the bits that were sent
    sum_collective = "all_to_all"  # what a reduce-scatter in this format calls

    @abstractmethod
    def num_bytes(self, num_elements: int, encoding: Encoding) -> int:
        """Return the bytes sent for ``num_elements`` values of ``encoding``."""

    def sent_bytes(self, num_elements: int, encoding: Encoding, num_ranks: int) -> int:
        """Return the bytes that a rank sends in an all-gather that yields ``num_elements`` on each of ``num_ranks``.

        A reduce-scatter of ``num_elements`` sends as many.
        """
        return (num_ranks - 1) * self.num_bytes(num_elements // num_ranks, encoding)

    def groups_of_sum(self, axes: tuple[str, ...], mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
        """Return the axes of the groups that a reduce-scatter over ``axes`` uses, one after the other."""
        return (axes,)

    @abstractmethod
    def gather_scratch_bytes(self, num_elements: int) -> int:
        """Return the scratch memory of an all-gather that yields ``num_elements``."""

    @abstractmethod
    def sum_scratch_bytes(self, num_elements: int, axes: tuple[str, ...], mesh: MeshShape) -> int:
        """Return the scratch memory of a reduce-scatter of ``num_elements`` over ``axes``."""


class Full(Format):
    """The format of uncompressed values; :func:`~partita.table.scratch.scratch_bytes` counts what a reduce-scatter
    receives.
    """

    is_exact = True
    sum_collective = "reduce_scatter"

    def num_bytes(self, num_elements: int, encoding: Encoding) -> int:
        return num_elements * encoding.itemsize

    def gather_scratch_bytes(self, num_elements: int) -> int:
        return 0

    def sum_scratch_bytes(self, num_elements: int, axes: tuple[str, ...], mesh: MeshShape) -> int:
        raise NotImplementedError("depends on the itemsize and the backend; see partita.table.scratch")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Full)

    def __hash__(self) -> int:
        return hash(Full)

    def __repr__(self) -> str:
        return "FULL"


FULL = Full()
