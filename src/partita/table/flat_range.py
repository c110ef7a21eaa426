"""Flat ranges of a global parameter, as boxes in its own coordinates.

A rank stores elements ``[start, stop)`` of a local tensor in memory order. In the global tensor's coordinates each of
the ranges that the local tensor consists of is the end of a row, full rows, and the beginning of a row; the same holds
inside these rows. So for n dimensions there are at most 2n - 1 boxes, each contiguous in the range. Thus states can be
described without reference to ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from partita.table.box import Box
from partita.table.place import Place


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor, from the one with the largest stride to the one with the smallest."""
    return tuple(sorted(range(len(stride)), key=lambda dim: (-stride[dim], dim)))


@dataclass(frozen=True)
class FlatRange:
    """Elements ``[start, stop)``, in memory order, of the local tensor at a ``place`` of a global one.

    ``order``: the local tensor's dimensions, from the one with the largest stride to the one with the smallest.
    """

    place: Place
    order: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def row_major(cls, shape: Sequence[int], start: int = 0, stop: int | None = None) -> "FlatRange":
        """Return a range (``stop`` None: to the end) of a full, contiguous tensor."""
        end = math.prod(shape) if stop is None else stop
        return cls(Place(tuple(shape)), tuple(range(len(shape))), start, end)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global tensor."""
        return self.place.shape

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def is_row_major(self) -> bool:
        """True if a box's elements lie in memory in the order of its own coordinates."""
        return self.order == tuple(range(len(self.order)))

    def boxes(self, most: int = 2**63) -> Iterator[tuple[Box, slice]]:
        """Yield the range's boxes in the global tensor, of at most ``most`` elements, each with its slice of the range.
        A tensor without elements is one box.
        """
        for first, there in self.place.in_memory():
            low, high = max(self.start - first, 0), min(self.stop - first, there.num_elements)
            moved = any(there.offsets)
            for box, begin in self._boxes_of(there.sizes, low, high, most):
                at = first + begin - self.start
                yield (box.placed_in(there) if moved else box), slice(at, at + box.num_elements)

    def _boxes_of(self, sizes: tuple[int, ...], low: int, high: int, most: int) -> Iterator[tuple[Box, int]]:
        """Yield the boxes of elements ``[low, high)`` of a dense tensor, each with its flat offset."""
        if 0 in sizes:
            yield Box.whole(sizes), self.start
        elif low == 0 and high == math.prod(sizes) <= most:
            yield Box.whole(sizes), 0
        else:
            inner = tuple(sizes[dim] for dim in self.order)
            for box, place in _cut(inner, low, high, most):
                offsets = tuple(box.offsets[at] for at in self._own_order)
                yield Box(offsets, tuple(box.sizes[at] for at in self._own_order)), place

    def shaped(self, flat: Tensor, box: Box) -> Tensor:
        """Return a box's elements, given in memory order, in the box's own shape; a view."""
        inner = flat.view([box.sizes[dim] for dim in self.order])
        return inner.permute(self._own_order)

    @property
    def _own_order(self) -> tuple[int, ...]:
        """The position of each dimension in memory order."""
        return tuple(self.order.index(dim) for dim in range(len(self.order)))


def _cut(shape: tuple[int, ...], start: int, stop: int, most: int, base: int = 0) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of a range of a row-major tensor, each with its flat offset, counted from ``base``."""
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
