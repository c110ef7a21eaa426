"""What of a batch belongs together: samples, what is left of them between padding, documents packed into one."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """Of a batch. ``samples`` is 1 where all are seen alike: they are then as many more heads."""

    samples: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Segments:
    """Stretches of queries with the stretch of keys that they may see; no query is in two. Each field is [segments].

    The query ``q`` stands at position ``q - q_start + offset``, the key ``k`` at ``k - k_start``.
    """

    sample: Tensor
    q_start: Tensor
    q_stop: Tensor
    k_start: Tensor
    k_stop: Tensor
    offset: Tensor

    def of_queries(self, start: int, stop: int) -> "Segments":
        """What these are for the queries from ``start`` to before ``stop`` alone, counted from ``start``."""
        first, end = self.q_start.clamp(min=start), self.q_stop.clamp(max=stop)
        left, offset = first < end, self.offset + first - self.q_start
        fields = (self.sample, first - start, end - start, self.k_start, self.k_stop, offset)
        return Segments(*(field[left] for field in fields))


def segments_of(sizes: Sizes, seen: Tensor | None, documents: Tensor | None) -> Segments:
    """Of a batch with padding, or documents packed into its samples, or neither."""
    return whole_samples(sizes, seen) if documents is None else documents_of(sizes, documents)


def whole_samples(sizes: Sizes, seen: Tensor | None = None) -> Segments:
    """Each sample as one segment, whose keys begin with the first that is seen, and end with the last.

    The last query is beside the last key, padded or not.

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
    """Each run of equal numbers in ``documents`` [samples, positions] is a segment."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    sample, start = begins.nonzero(as_tuple=True)
    stop = torch.full_like(start, sizes.keys)
    stop[:-1] = torch.where(sample[:-1] == sample[1:], start[1:], sizes.keys)
    return Segments(sample, start, stop, start, stop, torch.zeros_like(start))


def documents_by_position(positions: Tensor) -> Tensor | None:
    """Numbers of the documents [samples, positions] whose positions are these; None where there is one a sample.

    A document ends where the next position is not one higher, as transformers has it for packed samples. Positions
    without values, as of a simulated rank, are of one a sample.
    """
    if positions.is_meta:
        return None
    jumps = torch.zeros_like(positions, dtype=torch.long)
    jumps[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return jumps.cumsum(1) if bool(jumps.any()) else None
