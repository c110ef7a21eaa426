"""A model on paper: the layout of each unit with its rows of the table, and which gradients are reduced together.

The runtime is built from it, and the estimates are computed from it. What follows from a row on a mesh (what rests
whole, what goes through a buffer pool, what has memory of its own) is asked for here by both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import Residence, Tier
from partita.plan.span import SegmentLayout, Span
from partita.plan.state_plan import StatePlan
from partita.plan.steps import AllGather, ReduceScatter, Step, in_phases, steps

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

    # ---------------------------------------------------------------- parameters

    def rests_whole(self, mesh: MeshShape) -> bool:
        """Whether parameters rest as they are computed with: whole, on the device. Others go through a buffer pool."""
        return not steps(self.row.param_rest, self.row.param_compute, mesh)

    def stays_whole(self, mesh: MeshShape) -> bool:
        """Whether parameters stay whole, on the device, between forward and backward."""
        return not steps(self.row.param_compute, self.row.param_between, mesh)

    # ----------------------------------------------------------------- gradients

    def gradient_in_place(self, mesh: MeshShape) -> bool:
        """Whether gradients rest where autograd leaves them, which is also where the optimizer looks for them."""
        return self.row.gradients_rest and not steps(self.row.grad_arrival, self.row.grad_step, mesh)

    def gradient_rests_whole(self, mesh: MeshShape) -> bool:
        """Whether gradients are collected in memory on the device that keeps them whole between micro-batches."""
        between = self.row.grad_between
        is_whole = mesh.group_size(between.shard_axes) == 1 and between.tier is Tier.DEVICE
        return self.row.gradients_rest and is_whole and not self.gradient_in_place(mesh)

    def gradient_steps(self, mesh: MeshShape) -> tuple[Step, ...]:
        """From gradients as they are collected (on the device, in the encoding that they rest in) to the step."""
        collected = replace(self.row.grad_arrival, encoding=self.row.grad_step.encoding)
        return steps(collected, self.row.grad_step, mesh)

    def gradient_phases(self, mesh: MeshShape) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """The same steps in two: those to the sums, which every rank measures and scales its part of, and those that
        then bring the sums to where the optimizer works on more than this part.
        """
        phases = in_phases(self.gradient_steps(mesh))
        summed = tuple(takewhile(lambda op: not isinstance(op, AllGather), phases))
        return summed, phases[len(summed) :]

    def gradient_is_reduced(self, mesh: MeshShape) -> bool:
        """Whether gradients are added up over ranks."""
        return any(isinstance(op, ReduceScatter) for op in in_phases(self.gradient_steps(mesh)))

    def gradient_passes(self, mesh: MeshShape) -> bool:
        """Whether gradients are collected in a slot of a buffer pool, and leave it before the next micro-batch."""
        return not (self.gradient_in_place(mesh) or self.gradient_rests_whole(mesh))


@dataclass(frozen=True)
class PlannedUnit:
    """The segments of a unit. The root unit is called ``""``; ``aliases`` are other names of a shared module."""

    name: str
    segments: tuple[PlannedSegment, ...]
    aliases: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole unit in the compute encoding."""
        return sum(segment.layout.padded * segment.layout.encoding.itemsize for segment in self.segments)

    def rests_whole(self, mesh: MeshShape) -> bool:
        """As :meth:`PlannedSegment.rests_whole`; a unit's segments have their residences in common."""
        return self.segments[0].rests_whole(mesh)

    def stays_whole(self, mesh: MeshShape) -> bool:
        """As :meth:`PlannedSegment.stays_whole`."""
        return self.segments[0].stays_whole(mesh)

    def contains(self, other: "PlannedUnit") -> bool:
        """Whether the other unit's module lies inside this one's, which is open while the other comes and goes."""
        if not self.name:
            return bool(other.name)
        inside = tuple(f"{name}." for name in (self.name, *self.aliases))
        return any(name.startswith(inside) for name in (other.name, *other.aliases))


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
