"""The layout of a unit: which range of which flat buffer holds which parameter.

A unit's parameters are held in *segments*, one for each encoding and for parameters that train or do not when the
layout is made. A segment is a flat buffer cut into equal parts, one per rank of those that sum its gradients. Every
parameter starts, and every part ends, at a multiple of :data:`QUANTUM` elements, so block-wise encodings never straddle
a cut and vectorized kernels meet the same tails wherever the cuts are. One layout serves gather, reduce, optimizer,
tiers and checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partita.plan.box import Box
from partita.plan.residence import BLOCK, Encoding

QUANTUM = BLOCK


@dataclass(frozen=True)
class Span:
    """Elements ``[start, stop)`` of a parameter's local tensor (in its own stride order) at ``offset`` of a segment.

    ``box`` is the piece of the global parameter that the local tensor is; ``shape`` is that of the global parameter
    (None: the box is all of it).
    """

    fqn: str
    box: Box
    start: int
    stop: int
    offset: int
    shape: tuple[int, ...] | None = None

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the global parameter."""
        return self.box.sizes if self.shape is None else self.shape

    @property
    def is_part(self) -> bool:
        """Whether the local tensor is not all of the global parameter."""
        return self.box.sizes != self.global_shape

    def within(self, begin: int, end: int) -> "Span | None":
        """What of this span lies in ``[begin, end)`` of the segment, its offset counted from ``begin``."""
        low, high = max(self.offset, begin), min(self.offset + self.num_elements, end)
        if low >= high:
            return None
        start = self.start + low - self.offset
        return replace(self, start=start, stop=start + high - low, offset=low - begin)


@dataclass(frozen=True)
class Entry:
    """A parameter as the layout sees it, of this global ``shape``. ``box`` is the piece of it that the local tensor is
    (None: all of it).
    """

    fqn: str
    shape: tuple[int, ...]
    encoding: Encoding
    trainable: bool
    box: Box | None = None


@dataclass(frozen=True)
class SegmentLayout:
    """One flat buffer of a unit: ``num_parts`` equal parts of ``part_elements``."""

    encoding: Encoding
    trainable: bool
    spans: tuple[Span, ...]
    num_parts: int
    part_elements: int

    @property
    def padded(self) -> int:
        return self.num_parts * self.part_elements

    @property
    def num_bytes(self) -> int:
        return self.padded * self.encoding.itemsize

    def part(self, index: int) -> tuple[Span, ...]:
        """The spans of part ``index``, with offsets counted from its start."""
        return self.cut(index * self.part_elements, self.part_elements)

    def cut(self, begin: int, num_elements: int) -> tuple[Span, ...]:
        """The spans of the ``num_elements`` from ``begin`` on, with offsets counted from there."""
        found = (span.within(begin, begin + num_elements) for span in self.spans)
        return tuple(span for span in found if span is not None)


def lay_out(entries: Sequence[Entry], num_parts: int, num_replicas: int = 1) -> tuple[SegmentLayout, ...]:
    """Lay the parameters of one unit out for ``num_parts`` shards, in the order given.

    The ``num_replicas`` ranks that have the same part can cut it evenly among them.
    """
    quantum = QUANTUM * num_replicas
    grouped: dict[tuple[bool, Encoding], list[Entry]] = {}
    for entry in entries:
        grouped.setdefault((entry.trainable, entry.encoding), []).append(entry)
    segments = []
    for (trainable, encoding), members in grouped.items():
        spans = list[Span]()
        offset = 0
        for entry in members:
            box = entry.box or Box.whole(entry.shape)
            spans.append(Span(entry.fqn, box, 0, box.num_elements, offset, entry.shape if entry.box else None))
            offset += -(-box.num_elements // QUANTUM) * QUANTUM
        part = -(-offset // (num_parts * quantum)) * quantum
        segments.append(SegmentLayout(encoding, trainable, tuple(spans), num_parts, part))
    return tuple(segments)
