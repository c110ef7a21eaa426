"""A model on paper: the layout of each unit with its rows of the table, and which gradients are reduced together.

The runtime is built from it, and the estimates are computed from it: what follows from a row is said here, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import Residence, Tier
from partita.plan.span import SegmentLayout, Span
from partita.plan.state_plan import StatePlan
from partita.plan.steps import AllReduce, ReduceScatter, Step, steps

# Small segments share a bucket up to this size; it bounds the number of messages, not the memory.
BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True)
class PlannedSegment:
    """A flat buffer of a unit, its row of the table, and the mesh over which the row's axes are."""

    layout: SegmentLayout
    row: StatePlan
    mesh: MeshShape

    @property
    def trains(self) -> bool:
        """Whether it did when the plan was made."""
        return self.layout.trainable

    @property
    def num_bytes(self) -> int:
        """Of all its parameters, in the compute encoding."""
        return self.layout.padded * self.layout.encoding.itemsize

    # ---------------------------------------------------------------- parameters

    @cached_property
    def rests_whole(self) -> bool:
        """Whether the parameters rest as they are computed with: nothing has to be brought before a forward."""
        return not steps(self.row.param_rest, self.row.param_compute, self.mesh)

    @cached_property
    def stays_whole(self) -> bool:
        """Whether the parameters stay as they are computed with between forward and backward."""
        return not steps(self.row.param_compute, self.row.param_between, self.mesh)

    @cached_property
    def has_second(self) -> bool:
        """Whether what stays between forward and backward has memory of its own: a part, but not the part at rest."""
        return self._num_shards(self.row.param_between) not in (1, self._num_shards(self.row.param_rest))

    @property
    def rests_as_one_part(self) -> bool:
        """Whether all that a rank keeps of the parameters is one of the layout's parts."""
        return self._num_shards(self.row.param_rest) == self.layout.num_parts and not self.has_second

    # ------------------------------------------------------------ master weights

    @cached_property
    def master_is_parameter(self) -> bool:
        """Whether the master weights are the parameters at rest, or a part of them."""
        rest, master = self.row.param_rest, self.row.master
        same = (rest.encoding, rest.tier) == (master.encoding, master.tier)
        if same and rest.tier is Tier.DISK:  # what is read and written there is all of it
            same = self._num_shards(rest) == self._num_shards(master)
        return same

    @property
    def has_own_master(self) -> bool:
        """Whether master weights have memory of their own."""
        return self.trains and not self.master_is_parameter

    @cached_property
    def holds_whole_master(self) -> bool:
        """Whether every rank updates all of it."""
        return self._num_shards(self.row.master) == 1

    # ----------------------------------------------------------------- gradients

    @cached_property
    def gradient_moves(self) -> bool:
        """Whether the optimizer's gradient is another than autograd's: elsewhere, encoded otherwise, or summed."""
        return bool(steps(self.row.grad_arrival, self.row.grad_step, self.mesh))

    @property
    def gradient_in_place(self) -> bool:
        """Whether gradients rest where autograd leaves them, which is also where the optimizer looks for them."""
        return self.row.gradients_rest and not self.gradient_moves

    @property
    def gradient_rests_whole(self) -> bool:
        """Whether gradients are collected in memory on the device that keeps them whole between micro-batches."""
        between = self.row.grad_between
        is_whole = self._num_shards(between) == 1 and between.tier is Tier.DEVICE
        return self.row.gradients_rest and is_whole and not self.gradient_in_place

    @cached_property
    def gradient_steps(self) -> tuple[Step, ...]:
        """From gradients as they are collected (on the device, encoded as they rest) to the optimizer's."""
        collected = replace(self.row.grad_arrival, encoding=self.row.grad_step.encoding)
        return steps(collected, self.row.grad_step, self.mesh)

    @property
    def gradient_is_reduced(self) -> bool:
        """Whether gradients are added up over ranks."""
        return any(isinstance(op, AllReduce | ReduceScatter) for op in self.gradient_steps)

    @property
    def gradient_passes(self) -> bool:
        """Whether gradients are collected in a slot of a buffer pool, and leave it before the next micro-batch."""
        return not (self.gradient_in_place or self.gradient_rests_whole)

    # ------------------------------------------------------------- what a rank holds

    def held_bytes(self, residence: Residence) -> int:
        """Bytes that a rank holds under ``residence``, with the padding."""
        return residence.num_bytes(self.layout.padded, self.mesh)

    def spans_of(self, residence: Residence, rank: int) -> tuple[Span, ...]:
        """The spans of what ``rank`` holds under ``residence``, with offsets counted from its start."""
        num = residence.num_elements(self.layout.padded, self.mesh)
        return self.layout.cut(self.mesh.group_index(rank, residence.shard_axes) * num, num)

    def _num_shards(self, residence: Residence) -> int:
        return self.mesh.group_size(residence.shard_axes)


@dataclass(frozen=True)
class PlannedUnit:
    """The segments of a unit. The root unit is called ``""``; ``inside`` are the names of the units around it."""

    name: str
    segments: tuple[PlannedSegment, ...]
    inside: tuple[str, ...] = ()

    @property
    def row(self) -> StatePlan:
        """Of the unit's first segment: rows of a unit differ in encodings only."""
        return self.segments[0].row

    @property
    def rests_whole(self) -> bool:
        """See :class:`PlannedSegment`: one that does not borrows a slot of the buffer pool while it is used."""
        return self.segments[0].rests_whole

    @property
    def stays_whole(self) -> bool:
        return self.segments[0].stays_whole

    @cached_property
    def num_bytes(self) -> int:
        """Of the whole unit in the compute encodings."""
        return sum(segment.num_bytes for segment in self.segments)

    def contains(self, other: "PlannedUnit") -> bool:
        """Whether the other unit's module lies inside this one's, which is open while the other comes and goes."""
        return self.name in other.inside


@dataclass(frozen=True)
class PlannedBucket:
    """Segments whose gradients are reduced together: they rest alike."""

    segments: tuple[PlannedSegment, ...]

    @property
    def first(self) -> PlannedSegment:
        """Which says how the gradients of all of them move."""
        return self.segments[0]

    @property
    def num_elements(self) -> int:
        return sum(segment.layout.padded for segment in self.segments)

    @property
    def num_bytes(self) -> int:
        """Of the gradients of all ranks' parts, in the encoding in which they travel."""
        return self.num_elements * self.first.row.grad_step.encoding.itemsize

    @property
    def shard_bytes(self) -> int:
        """Of what the reduction leaves on each rank."""
        return self.num_bytes // self.first.layout.num_parts

    @property
    def travels(self) -> bool:
        """Whether it has a turn in the order of reductions: its gradients are added up, or sent to where they rest."""
        return self.first.gradient_is_reduced or self.first.gradient_passes


def reduction_order(units: Sequence[PlannedUnit]) -> list[PlannedSegment]:
    """The segments that train, last unit first: the order in which backward finishes them."""
    return [segment for unit in reversed(units) for segment in unit.segments if segment.trains]


def share_buckets(segments: Sequence[PlannedSegment], max_bytes: int = BUCKET_BYTES) -> list[PlannedBucket]:
    """The buckets of the segments, in the order in which they are reduced.

    Neighbours share one while they rest alike and fit in ``max_bytes``. A gradient that the optimizer sees whole has a
    bucket of its own, so that it keeps its parameter's shape.
    """
    groups: list[list[PlannedSegment]] = []
    room, before = 0, None
    for segment in segments:
        residence = segment.row.grad_step
        rests = (residence, segment.row.master.tier)
        size = segment.layout.padded * residence.encoding.itemsize
        if rests == before and size <= room and segment.mesh.group_size(residence.shard_axes) > 1:
            groups[-1].append(segment)
            room -= size
        else:
            groups.append([segment])
            room = max_bytes - size
            before = rests
    return [PlannedBucket(tuple(group)) for group in groups]
