"""Segments of a batch, which see only themselves: samples, samples without padding, or packed documents."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """The sizes of a batch. ``samples`` is 1 if all samples have the same mask: they then count as heads."""

    samples: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Segments:
    """Ranges of queries with the range of keys that they may see; no query is in two. Each field is [segments].

    The query ``q`` is at position ``q - q_start + offset``, the key ``k`` at ``k - k_start``.
    """

    sample: Tensor
    q_start: Tensor
    q_stop: Tensor
    k_start: Tensor
    k_stop: Tensor
    offset: Tensor

    def of_queries(self, start: int, stop: int) -> "Segments":
        """Return the segments of the queries from ``start`` up to ``stop`` alone, which are counted from ``start``."""
        first, end = self.q_start.clamp(min=start), self.q_stop.clamp(max=stop)
        left, offset = first < end, self.offset + first - self.q_start
        fields = (self.sample, first - start, end - start, self.k_start, self.k_stop, offset)
        return Segments(*(field[left] for field in fields))


def segments_of(sizes: Sizes, seen: Tensor | None, documents: Tensor | None) -> Segments:
    """Return the segments of a batch with padding, or with documents packed into its samples, or with neither."""
    return whole_samples(sizes, seen) if documents is None else documents_of(sizes, documents)


def whole_samples(sizes: Sizes, seen: Tensor | None = None) -> Segments:
    """Return each sample as one segment, whose keys are those from the first that is seen to the last.

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
    """Return each run of equal numbers in ``documents`` [samples, positions] as a segment."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    sample, start = begins.nonzero(as_tuple=True)
    stop = torch.full_like(start, sizes.keys)
    stop[:-1] = torch.where(sample[:-1] == sample[1:], start[1:], sizes.keys)
    return Segments(sample, start, stop, start, stop, torch.zeros_like(start))


def documents_by_position(positions: Tensor) -> Tensor | None:
    """Return the numbers [samples, positions] of the documents with these positions; None: one document per sample.

    A document ends where the next position is not one higher, as in transformers' packed samples. Positions without
    values, as on a simulated rank, count as one document per sample.
    """
    if positions.is_meta:
        return None
    jumps = torch.zeros_like(positions, dtype=torch.long)
    jumps[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return jumps.cumsum(1) if bool(jumps.any()) else None
