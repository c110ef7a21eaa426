"""Numbers of bytes, with the share of them that does not grow with the number of samples."""

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

    ``moments`` has the moments that are the largest for some number of samples: total bytes, by their fixed bytes.
    """

    moments: Mapping[int, int] = field(default_factory=lambda: {0: 0})

    @property
    def num_bytes(self) -> int:
        return max(self.moments.values())

    def scaled(self, factor: Fraction) -> "Peak":
        """Return the peak for ``factor`` times as many samples."""
        return Peak({fixed: Size(every, fixed).scaled(factor).num_bytes for fixed, every in self.moments.items()})


NO_PEAK = Peak()


@dataclass
class Peaks:
    """The moments of one place while they are recorded."""

    _most: dict[int, int] = field(default_factory=dict)

    def note(self, size: Size) -> None:
        """Record the bytes that exist at a moment."""
        self._most[size.fixed] = max(self._most.get(size.fixed, 0), size.num_bytes)

    @property
    def num_bytes(self) -> int:
        return max(self._most.values(), default=0)

    def above(self, there: Size) -> Peak:
        """Return the peak without the bytes ``there`` that existed before."""
        return Peak({fixed - there.fixed: every - there.num_bytes for fixed, every in (self._most or {0: 0}).items()})
