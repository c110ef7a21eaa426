"""Boxes: rectangular slices of a global parameter in its own coordinates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A rectangular slice of a global tensor: its offset and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects the box from a tensor, as a view."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def meet(self, other: "Box") -> "Box | None":
        """Return the intersection of both; None where it is empty."""
        if self == other:
            return self if 0 not in self.sizes else None
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: "Box") -> "Box":
        """Return this box with offsets relative to the beginning of ``outer``, which contains it."""
        return Box(tuple(mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def placed_in(self, outer: "Box") -> "Box":
        """Return this box, whose offsets are relative to ``outer``, in the coordinates of ``outer``."""
        return Box(tuple(mine + theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def _ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))
