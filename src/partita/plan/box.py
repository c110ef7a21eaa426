"""Pieces of a global parameter: rectangles in its own coordinates, and the flat ranges that ranks hold as rectangles.

A rank holds elements ``[start, stop)`` of a parameter in the order in which they lie in memory. In the parameter's own
coordinates that is a part of a row, whole rows, and a part of a row, and so on inwards: at most ``2 * dims - 1`` boxes,
each of which is contiguous in the range. So nothing that is written down about a state needs to know of ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A rectangular piece of a global parameter: where it starts and how far it goes, a dimension each."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    def meet(self, other: "Box") -> "Box | None":
        """What lies in both; None where nothing does."""
        if self == other:
            return self if 0 not in self.sizes else None
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: "Box") -> "Box":
        """This box, with its place counted from the beginning of one that contains it."""
        return Box(tuple(mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def _ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a dense tensor, from the one whose steps are widest in memory to the narrowest."""
    return tuple(sorted(range(len(stride)), key=lambda dim: (-stride[dim], dim)))


def boxes_of(
    shape: Sequence[int], order: Sequence[int], start: int, stop: int, most: int = 2**63
) -> Iterator[tuple[Box, int]]:
    """The boxes of elements ``[start, stop)`` of a tensor whose dimensions lie in memory in this ``order``, each with
    the flat place of its first element; of at most ``most`` elements each. A tensor without elements is one box.
    """
    if 0 in shape:
        yield Box.whole(shape), start
    if start == 0 and stop == math.prod(shape) and 0 < stop <= most:
        yield Box.whole(shape), 0
        return
    inner = tuple(shape[dim] for dim in order)
    for box, place in _cut(inner, start, stop, most):
        offsets, sizes = [0] * len(order), [1] * len(order)
        for at, dim in enumerate(order):
            offsets[dim], sizes[dim] = box.offsets[at], box.sizes[at]
        yield Box(tuple(offsets), tuple(sizes)), place


def _cut(shape: tuple[int, ...], start: int, stop: int, most: int, base: int = 0) -> Iterator[tuple[Box, int]]:
    """The same for dimensions in their own order; places are counted from ``base``."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ()), base + start
        return
    row = math.prod(shape[1:])
    while start < stop:
        number, begin = divmod(start, row)
        num_rows = min((stop - start) // row, max(1, most // row)) if begin == 0 else 0
        if num_rows and (row <= most or len(shape) == 1):
            yield Box((number,) + (0,) * (len(shape) - 1), (num_rows, *shape[1:])), base + start
            start += num_rows * row
            continue
        end = min(stop, (number + 1) * row)
        for box, place in _cut(shape[1:], begin, begin + end - start, most, base + number * row):
            yield Box((number, *box.offsets), (1, *box.sizes)), place
        start = end
