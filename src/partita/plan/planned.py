"""A model on paper: the layout of each unit with its rows of the table, and which gradients are reduced together.

The runtime is built from it, and the estimates are computed from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import Residence, Tier
from partita.plan.span import SegmentLayout, Span
from partita.plan.state_plan import StatePlan

# Small segments share a bucket up to this size; it bounds the number of messages, not the memory.
BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True)
class PlannedSegment:
    """A flat buffer of a unit, and its row of the table."""

    layout: SegmentLayout
    row: StatePlan

    @property
    def trains(self) -> bool:
        return self.layout.trainable

    def master_is_parameter(self, mesh: MeshShape) -> bool:
        """Whether the master weights are the parameters at rest, or a part of them."""
        rest, master = self.row.param_rest, self.row.master
        same = (rest.encoding, rest.tier) == (master.encoding, master.tier)
        if same and rest.tier is Tier.DISK:  # what is read and written there is all of it
            same = mesh.group_size(rest.shard_axes) == mesh.group_size(master.shard_axes)
        return same

    def has_own_master(self, mesh: MeshShape) -> bool:
        """Whether master weights have memory of their own."""
        return self.trains and not self.master_is_parameter(mesh)

    def has_second(self, mesh: MeshShape) -> bool:
        """Whether what stays between forward and backward has memory of its own: a part, but not the part at rest."""
        between, rest = (mesh.group_size(r.shard_axes) for r in (self.row.param_between, self.row.param_rest))
        return between not in (1, rest)

    def spans_of(self, residence: Residence, mesh: MeshShape, rank: int) -> tuple[Span, ...]:
        """The spans of what ``rank`` holds under ``residence``, with offsets counted from its start."""
        num = residence.num_elements(self.layout.padded, mesh)
        begin = mesh.group_index(rank, residence.shard_axes) * num
        cut = (span.within(begin, begin + num) for span in self.layout.spans)
        return tuple(span for span in cut if span is not None)


@dataclass(frozen=True)
class PlannedUnit:
    """The segments of a unit. The root unit is called ``""``."""

    name: str
    segments: tuple[PlannedSegment, ...]


def reduction_order(units: Sequence[PlannedUnit]) -> list[PlannedSegment]:
    """The segments that train, last unit first: the order in which backward finishes them."""
    return [segment for unit in reversed(units) for segment in unit.segments if segment.trains]


def share_buckets(
    segments: Sequence[PlannedSegment], mesh: MeshShape, max_bytes: int = BUCKET_BYTES
) -> list[tuple[int, ...]]:
    """Which of the segments (their positions) share a bucket, in the order in which buckets are reduced.

    Neighbours share one while they rest alike and fit in ``max_bytes``. A gradient that the optimizer sees whole has a
    bucket of its own, so that it keeps its parameter's shape.
    """
    groups: list[list[int]] = []
    room, before = 0, None
    for position, segment in enumerate(segments):
        residence = segment.row.grad_step
        rests = (residence, segment.row.master.tier)
        size = segment.layout.padded * residence.encoding.itemsize
        if rests == before and size <= room and mesh.group_size(residence.shard_axes) > 1:
            groups[-1].append(position)
            room -= size
        else:
            groups.append([position])
            room, before = max_bytes - size, rests
    return [tuple(group) for group in groups]
