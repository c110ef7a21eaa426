"""The layout of a unit: the range of each parameter in a flat buffer.

A unit's parameters are in *segments*: one for each encoding, separately for parameters that train and those that do
not when the layout is created, and for parameters with and without copies on other ranks. A segment is a flat buffer
with equal shards, one for each of the ranks that sum its gradients. Every parameter starts, and every shard ends, at a
multiple of :data:`QUANTUM` elements, so block-wise encodings never straddle a shard border and vectorized kernels have
the same tails under every sharding. Gathers, reductions, the optimizer, tiers and checkpoints use the same layout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from partita.table.place import Place
from partita.table.residence import BLOCK, Encoding
from partita.table.share import NO_COPIES, Copies

QUANTUM = BLOCK
CountRanks = Callable[[Copies], int]


@dataclass(frozen=True)
class Span:
    """Elements ``[start, stop)`` of a parameter's local tensor (in its own stride order) at ``offset`` of a segment.

    ``place`` is the position of the local tensor in the global parameter.
    """

    fqn: str
    place: Place
    start: int
    stop: int
    offset: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    def within(self, begin: int, end: int) -> "Span | None":
        """Return the part of this span in ``[begin, end)`` of the segment, its offset counted from ``begin``."""
        low, high = max(self.offset, begin), min(self.offset + self.num_elements, end)
        if low >= high:
            return None
        start = self.start + low - self.offset
        return replace(self, start=start, stop=start + high - low, offset=low - begin)


@dataclass(frozen=True)
class Entry:
    """A parameter to lay out.

    Attributes:
        shape: of the global parameter, of which the local tensor is at ``place`` (None: all of it).
        copies: the axes along which ranks have copies of it.
        frozen_master: True for a frozen parameter that keeps its values in fp32, besides those in 16 bits.
    """

    fqn: str
    shape: tuple[int, ...]
    encoding: Encoding
    trainable: bool
    place: Place | None = None
    copies: Copies = NO_COPIES
    frozen_master: bool = False

    @property
    def kind(self) -> tuple[object, ...]:
        """The key of the parameter's segment: parameters of one kind share a segment.

        A parameter that several pipeline stages have is alone in its segment, so that its layout is the same on all of
        them.
        """
        tied = self.fqn if self.copies.is_tied else None
        return self.trainable, self.frozen_master, self.encoding, self.copies, tied


@dataclass(frozen=True)
class SegmentLayout:
    """One flat buffer of a unit: ``num_shards`` equal shards of ``shard_elements``."""

    encoding: Encoding
    trainable: bool
    spans: tuple[Span, ...]
    num_shards: int
    shard_elements: int
    copies: Copies = NO_COPIES
    frozen_master: bool = False

    @property
    def has_master(self) -> bool:
        """True if there are master weights from the start: of trained parameters, and of frozen ones that keep fp32
        values.
        """
        return self.trainable or self.frozen_master

    @property
    def padded(self) -> int:
        return self.num_shards * self.shard_elements

    @property
    def num_bytes(self) -> int:
        return self.padded * self.encoding.itemsize

    def part(self, index: int) -> tuple[Span, ...]:
        """Return the spans of shard ``index``, with offsets from its start."""
        return self.cut(index * self.shard_elements, self.shard_elements)

    def cut(self, begin: int, num_elements: int) -> tuple[Span, ...]:
        """Return the spans of the ``num_elements`` from ``begin`` on, with offsets from there."""
        found = (span.within(begin, begin + num_elements) for span in self.spans)
        return tuple(span for span in found if span is not None)


def build_layout(
    entries: Sequence[Entry], num_shards: int | CountRanks, num_copies: CountRanks = lambda _: 1
) -> tuple[SegmentLayout, ...]:
    """Return the flat segments of one unit's parameters, in the order given.

    Args:
        num_shards: the number of shards; a function if it depends on ``copies``.
        num_copies: the number of ranks with the same shard, which is divisible by it.
    """
    grouped: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.kind, []).append(entry)
    segments = []
    for members in grouped.values():
        spans = list[Span]()
        offset = 0
        for entry in members:
            place = entry.place or Place(entry.shape)
            spans.append(Span(entry.fqn, place, 0, place.num_elements, offset))
            offset += -(-place.num_elements // QUANTUM) * QUANTUM
        first = members[0]
        quantum = QUANTUM * num_copies(first.copies)
        parts = num_shards if isinstance(num_shards, int) else num_shards(first.copies)
        part = -(-offset // (parts * quantum)) * quantum
        segments.append(
            SegmentLayout(first.encoding, first.trainable, tuple(spans), parts, part, first.copies, first.frozen_master)
        )
    return tuple(segments)
