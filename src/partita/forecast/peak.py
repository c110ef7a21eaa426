"""Bytes at the most, of some samples or of more of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil


@dataclass(frozen=True)
class Peak:
    """Of the moments that are the most for some number of samples: by the bytes that are as many for every number
    (gradients of parameters), all bytes.
    """

    moments: Mapping[int, int] = field(default_factory=lambda: {0: 0})

    @property
    def num_bytes(self) -> int:
        return max(self.moments.values())

    def scaled(self, factor: Fraction) -> "Peak":
        """Of so many times as many samples."""
        return Peak({fixed: fixed + ceil(factor * (every - fixed)) for fixed, every in self.moments.items()})


NONE = Peak()


@dataclass
class Peaks:
    """The moments of one place while they are recorded."""

    _most: dict[int, int] = field(default_factory=dict)

    def note(self, num_bytes: int, fixed_bytes: int) -> None:
        """A moment with so many bytes, of which some are there for every number of samples."""
        self._most[fixed_bytes] = max(self._most.get(fixed_bytes, 0), num_bytes)

    @property
    def num_bytes(self) -> int:
        return max(self._most.values(), default=0)

    def above(self, there: int) -> Peak:
        """Without what is ``there`` before, and is for each sample."""
        return Peak({fixed: every - there for fixed, every in (self._most or {0: 0}).items()})
