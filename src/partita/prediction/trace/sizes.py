"""Numbers of bytes, with the part of them that does not grow with the number of samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil


@dataclass(frozen=True)
class Size:
    """``num_bytes``, of which ``fixed`` do not grow with the number of samples.

    Fixed bytes are those of gradients of parameters, and of tables of positions.
    """

    num_bytes: int = 0
    fixed: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.num_bytes + other.num_bytes, self.fixed + other.fixed)

    def __sub__(self, other: "Size") -> "Size":
        return Size(self.num_bytes - other.num_bytes, self.fixed - other.fixed)

    def scaled(self, factor: Fraction) -> "Size":
        """Return the size for ``factor`` times as many samples."""
        return Size(self.fixed + ceil(factor * (self.num_bytes - self.fixed)), self.fixed)


NOTHING = Size()


@dataclass(frozen=True)
class Peak:
    """Peak bytes for any number of samples.

    ``by_fixed_bytes``: the largest total bytes for each number of fixed bytes. Which one is the peak depends on the
    number of samples.
    """

    by_fixed_bytes: Mapping[int, int] = field(default_factory=lambda: {0: 0})

    @property
    def num_bytes(self) -> int:
        return max(self.by_fixed_bytes.values())

    def scaled(self, factor: Fraction) -> "Peak":
        """Return the peak for ``factor`` times as many samples."""
        return Peak(
            {fixed: Size(every, fixed).scaled(factor).num_bytes for fixed, every in self.by_fixed_bytes.items()}
        )


NO_PEAK = Peak()


@dataclass
class Peaks:
    """Recorder of the peaks of one block."""

    _most: dict[int, int] = field(default_factory=dict)

    def note(self, size: Size) -> None:
        """Record the bytes that currently exist."""
        self._most[size.fixed] = max(self._most.get(size.fixed, 0), size.num_bytes)

    @property
    def num_bytes(self) -> int:
        return max(self._most.values(), default=0)

    def above(self, existing: Size) -> Peak:
        """Return the peak without the bytes ``existing`` that existed before."""
        return Peak(
            {fixed - existing.fixed: every - existing.num_bytes for fixed, every in (self._most or {0: 0}).items()}
        )
