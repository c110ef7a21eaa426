"""Segments of a batch, which do not see each other: samples without padding, or packed documents."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """The sizes of a batch. ``samples`` is 1 if all samples have the same mask; they are then treated as heads."""

    samples: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Segments:
    """Ranges of queries, and the range of keys that they may see. The ranges of queries are disjoint. Each field is
    [segments].

    The query ``q`` is at position ``q - q_start + offset``, the key ``k`` at ``k - k_start``.
    """

    sample: Tensor
    q_start: Tensor
    q_stop: Tensor
    k_start: Tensor
    k_stop: Tensor
    offset: Tensor

    def of_queries(self, start: int, stop: int) -> "Segments":
        """Return the segments of the queries ``start`` to ``stop - 1``, renumbered from 0."""
        first, end = self.q_start.clamp(min=start), self.q_stop.clamp(max=stop)
        is_inside, offset = first < end, self.offset + first - self.q_start
        fields = (self.sample, first - start, end - start, self.k_start, self.k_stop, offset)
        return Segments(*(field[is_inside] for field in fields))


def segments_of(sizes: Sizes, seen: Tensor | None, documents: Tensor | None) -> Segments:
    """Return the segments of a batch, which may have padding or packed documents."""
    return whole_samples(sizes, seen) if documents is None else documents_of(sizes, documents)


def whole_samples(sizes: Sizes, seen: Tensor | None = None) -> Segments:
    """Return one segment per sample, whose keys are those between leading and trailing padding.

    The last query is aligned with the last key, padded or not.

    Args:
        seen: bool [samples, keys]: False for padding.
    """
    sample = torch.arange(sizes.samples, device="cpu")
    none = torch.zeros_like(sample)
    first, stop = none, torch.full_like(sample, sizes.keys)
    if seen is not None:
        found = seen.any(1)
        first = torch.where(found, seen.int().argmax(1), none)
        stop = torch.where(found, sizes.keys - seen.flip(1).int().argmax(1), none)
    return Segments(
        sample, none, torch.full_like(sample, sizes.queries), first, stop, sizes.keys - sizes.queries - first
    )


def documents_of(sizes: Sizes, documents: Tensor) -> Segments:
    """Return one segment per run of equal numbers in ``documents`` [samples, positions]."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    sample, start = begins.nonzero(as_tuple=True)
    stop = torch.full_like(start, sizes.keys)
    stop[:-1] = torch.where(sample[:-1] == sample[1:], start[1:], sizes.keys)
    return Segments(sample, start, stop, start, stop, torch.zeros_like(start))


def documents_by_position(positions: Tensor) -> Tensor | None:
    """Return the document number of each of the ``positions`` [samples, length]; None: one document per sample.

    A document ends where the next position is not one higher, as in transformers' packed samples. If positions have no
    values, as on a simulated rank, each sample is one document.
    """
    if positions.is_meta:
        return None
    jumps = torch.zeros_like(positions, dtype=torch.long)
    jumps[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return jumps.cumsum(1) if bool(jumps.any()) else None
