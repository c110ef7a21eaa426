"""Pieces of a global parameter: rectangles in its own coordinates, and the flat ranges that ranks hold as rectangles.

A rank holds elements ``[start, stop)`` of a tensor in the order in which they lie in memory. In the tensor's own
coordinates that is a part of a row, whole rows, and a part of a row, and so on inwards: of n dimensions at most 2n - 1
boxes, each of which is contiguous in the range. So nothing that is written down about a state needs to know of ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Box:
    """A rectangular piece of a global tensor: where it starts and how far it goes, a dimension each."""

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
        """What takes the box out of a tensor, as a view."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

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

    def placed_in(self, outer: "Box") -> "Box":
        """The opposite: this box, whose place is counted from the beginning of ``outer``, in what that is a box of."""
        return Box(tuple(mine + theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def _ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a dense tensor, from the one whose steps are widest in memory to the narrowest."""
    return tuple(sorted(range(len(stride)), key=lambda dim: (-stride[dim], dim)))


@dataclass(frozen=True)
class FlatRange:
    """Elements ``[start, stop)``, as they lie in memory, of a local tensor: the ``box`` of a global one of ``shape``.

    ``order``: the local tensor's dimensions, from the one whose steps are widest in memory to the narrowest.
    """

    shape: tuple[int, ...]
    box: Box
    order: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def row_major(cls, shape: Sequence[int], start: int = 0, stop: int | None = None) -> "FlatRange":
        """A range (None: to the end) of a whole, contiguous tensor."""
        end = math.prod(shape) if stop is None else stop
        return cls(tuple(shape), Box.whole(shape), tuple(range(len(shape))), start, end)

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def is_row_major(self) -> bool:
        """Whether a box's elements lie in memory in the order of its own coordinates."""
        return self.order == tuple(range(len(self.order)))

    def boxes(self, most: int = 2**63) -> Iterator[tuple[Box, slice]]:
        """Its boxes in the global tensor, of at most ``most`` elements, each with its place in the range. A tensor
        without elements is one box.
        """
        moved = any(self.box.offsets)
        for box, first in self._local_boxes(most):
            place = slice(first - self.start, first - self.start + box.num_elements)
            yield (box.placed_in(self.box) if moved else box), place

    def _local_boxes(self, most: int) -> Iterator[tuple[Box, int]]:
        """The boxes in the local tensor, each with the flat place of its first element."""
        sizes = self.box.sizes
        if 0 in sizes:
            yield Box.whole(sizes), self.start
        elif self.start == 0 and self.stop == math.prod(sizes) <= most:
            yield Box.whole(sizes), 0
        else:
            inner = tuple(sizes[dim] for dim in self.order)
            for box, place in _cut(inner, self.start, self.stop, most):
                offsets = tuple(box.offsets[at] for at in self._own_order)
                yield Box(offsets, tuple(box.sizes[at] for at in self._own_order)), place

    def shaped(self, flat: Tensor, box: Box) -> Tensor:
        """A box's elements, given as they lie in memory, in its own coordinates; a view."""
        inner = flat.view([box.sizes[dim] for dim in self.order])
        return inner.permute(self._own_order)

    @property
    def _own_order(self) -> tuple[int, ...]:
        """The place of each dimension among those in memory order."""
        return tuple(self.order.index(dim) for dim in range(len(self.order)))


def _cut(shape: tuple[int, ...], start: int, stop: int, most: int, base: int = 0) -> Iterator[tuple[Box, int]]:
    """The boxes of a range of a row-major tensor; places are counted from ``base``."""
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
