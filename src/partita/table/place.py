"""The position of a rank's local tensor in a global parameter: all of it, or ranges of one of its dims."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from partita.table.box import Box


@dataclass(frozen=True)
class Place:
    """The position of a local tensor in a global tensor of ``shape``.

    The local tensor consists of the ``ranges`` ``[start, stop)`` of ``dim``, one after the other (None: all of it).
    They need not be in order or adjacent: a rank has one range of each of several fused weights. A single range of
    all of the dim is stored as None.

    Raises:
        ValueError: a range is empty, or outside the dim.
    """

    shape: tuple[int, ...]
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        for start, stop in self.ranges or ():
            if not 0 <= start < stop <= self.shape[self.dim]:
                raise ValueError(f"[{start}, {stop}) is no range of dim {self.dim} of {self.shape}")
        if self.ranges is not None and self.ranges == ((0, self.shape[self.dim]),):
            object.__setattr__(self, "ranges", None)

    @property
    def is_part(self) -> bool:
        """True if the local tensor is not the global one."""
        return self.ranges is not None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The local tensor's shape."""
        if self.ranges is None:
            return self.shape
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @cached_property
    def num_elements(self) -> int:
        """The number of elements of the local tensor."""
        return math.prod(self.sizes)

    def pieces(self) -> Iterator[tuple[Box, Box]]:
        """Yield each range as a pair: its box in the local tensor, and its box in the global one."""
        if self.ranges is None:
            yield Box.whole(self.shape), Box.whole(self.shape)
            return
        at = 0
        for start, stop in self.ranges:
            yield self._slab(at, stop - start), self._slab(start, stop - start)
            at += stop - start

    def in_memory(self) -> Iterator[tuple[int, Box]]:
        """Yield each contiguous piece of the local tensor's memory: its offset, and its box in the global tensor."""
        first = 0
        for _, there in self.pieces():
            yield first, there
            first += there.num_elements

    @property
    def begins_at(self) -> int | None:
        """The offset of the global tensor's first element in the local tensor's memory; None if it is not there."""
        return next((first for first, there in self.in_memory() if not any(there.offsets)), None)

    @property
    def stride(self) -> tuple[int, ...]:
        """The local tensor's strides, as :meth:`take` creates it from a contiguous tensor."""
        sizes, strides, step = self.sizes, [0] * len(self.shape), 1
        dims = range(len(sizes))
        inner = [dim for dim in dims if dim != self.dim] if self.has_several_ranges else list(dims)
        for dim in [*reversed(inner), *([self.dim] if self.has_several_ranges else [])]:
            strides[dim], step = step, step * max(1, sizes[dim])
        return tuple(strides)

    @property
    def has_several_ranges(self) -> bool:
        """True if the local tensor consists of several ranges; the dim is then outermost in memory."""
        return self.ranges is not None and len(self.ranges) > 1

    def _slab(self, start: int, length: int) -> Box:
        offsets = [0] * len(self.shape)
        offsets[self.dim] = start
        return Box(tuple(offsets), (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]))

    def take(self, full: Tensor) -> Tensor:
        """Return a copy of the local tensor's elements of a global one. If there are several ranges, the dim is
        outermost in memory, so that each of them is contiguous there.
        """
        if self.ranges is None:
            return full.clone()
        local = torch.empty_strided(self.sizes, self.stride, dtype=full.dtype, device=full.device)
        for own, place in self.pieces():
            local[own.slices] = full[place.slices]
        return local

    def put(self, local: Tensor, full: Tensor) -> None:
        """Write a local tensor into the global one: the inverse of :meth:`take`."""
        for own, place in self.pieces():
            full[place.slices] = local[own.slices]


def even(num: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Return ``[start, stop)`` of each of ``parts`` parts of ``num`` elements, in multiples of ``unit``; the first
    parts are one unit longer if it does not divide evenly. The last may be empty.
    """
    base, more = divmod(num // unit, parts)
    stops = [((part + 1) * base + min(part + 1, more)) * unit for part in range(parts)]
    return list(zip([0, *stops[:-1]], stops, strict=True))
