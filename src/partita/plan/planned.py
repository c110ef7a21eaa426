"""A model on paper: the layout of each unit with its rows of the table, and which gradients are reduced together.

The runtime is built from it, and the estimates are computed from it: what follows from a row is said here, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from partita.plan.mesh_shape import MeshShape
from partita.plan.planned_gradients import PlannedGradients, PlannedRounds
from partita.plan.residence import FP32, Residence, Tier
from partita.plan.span import SegmentLayout, Span
from partita.plan.state_plan import StatePlan
from partita.plan.steps import AllGather, Step, on_wires, steps
from partita.plan.wire import AS_THEY_ARE, FULL, Wires

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
        return self.num_shards(self.row.param_between) not in (1, self.num_shards(self.row.param_rest))

    @cached_property
    def master_is_parameter(self) -> bool:
        """Whether the master weights are the parameters at rest, or a part of them."""
        rest, master = self.row.param_rest, self.row.master
        same = (rest.encoding, rest.tier) == (master.encoding, master.tier) and not self.sends_changes
        if same and rest.tier is Tier.DISK:  # what is read and written there is all of it
            same = self.num_shards(rest) == self.num_shards(master)
        return same

    @cached_property
    def update_is_gathered(self) -> bool:
        """Whether bringing updated master weights into what rests takes the other ranks."""
        brought = steps(self.row.master, self.row.param_rest, self.mesh)
        return any(isinstance(op, AllGather) for op in brought)

    @cached_property
    def sends_changes(self) -> bool:
        """Whether ranks tell each other how far updated values are from what all have, in codes."""
        return self.update_is_gathered and self.row.wires.changes.is_coded

    @cached_property
    def publication(self) -> tuple[Step, ...]:
        """From updated master weights to the parameters at rest."""
        return self._publication(self.row.wires)

    @cached_property
    def warmup_publication(self) -> tuple[Step, ...]:
        """The same in the warm-up."""
        return self._publication(self.warmup_wires)

    def _publication(self, chosen: Wires) -> tuple[Step, ...]:
        wire = chosen.changes if self.sends_changes else FULL
        return on_wires(steps(self.row.master, self.row.param_rest, self.mesh), FULL, wire)

    @cached_property
    def gathers(self) -> tuple[Step, ...]:
        """From the parameters at rest to those in compute."""
        return on_wires(steps(self.row.param_rest, self.row.param_compute, self.mesh), FULL, self.row.wires.parameters)

    @cached_property
    def gathers_codes(self) -> bool:
        """Whether parameters are computed with as they are decoded, which is not quite as they rest."""
        return any(isinstance(op, AllGather) and op.wire.is_coded for op in self.gathers)

    @cached_property
    def gathered_code_bytes(self) -> int:
        """Of the codes that all parameters come in, or changes of those at rest, with room for one rank's in fp32."""
        if self.sends_changes:
            own, rest = (
                each.num_elements(self.layout.padded, self.mesh) for each in (self.row.master, self.row.param_rest)
            )
            coded = [wire for wire in (self.row.wires.changes, self.warmup_wires.changes) if wire.is_coded]
            return max(wire.num_bytes(rest) for wire in coded) + FP32.num_bytes(own)
        return self.row.wires.parameters.num_bytes(self.layout.padded) if self.gathers_codes else 0

    @cached_property
    def gradients(self) -> PlannedGradients:
        """Where they are collected, and how they are summed."""
        return PlannedGradients(self.layout, self.row, self.mesh)

    @cached_property
    def rounds(self) -> PlannedRounds:
        """Of replicas that train apart."""
        return PlannedRounds(self.layout, self.row, self.mesh)

    @property
    def warmup_wires(self) -> Wires:
        """What travels in the warm-up."""
        return self.row.wires.first or AS_THEY_ARE

    def is_first_copy(self, rank: int) -> bool:
        """Whether, of the ranks that have the same part of the states, ``rank`` is the one that saves."""
        return all(self.mesh.coordinate(rank, axis) == 0 for axis in (*self.row.alike_axes, *self.row.copies.axes))

    def is_first_of_replica(self, rank: int) -> bool:
        """The same among the ranks of one replica, where these train apart: each measures its own gradients."""
        return all(self.mesh.coordinate(rank, axis) == 0 for axis in (*self.row.replica_axes, *self.row.copies.axes))

    def num_shards(self, residence: Residence) -> int:
        """Ranks among which ``residence`` splits a state."""
        return self.mesh.group_size(residence.shard_axes)

    def held_bytes(self, residence: Residence) -> int:
        """Bytes that a rank holds under ``residence``, with the padding."""
        return residence.num_bytes(self.layout.padded, self.mesh)

    def spans_of(self, residence: Residence, rank: int) -> tuple[Span, ...]:
        """The spans of what ``rank`` holds under ``residence``, with offsets counted from its start."""
        num = residence.num_elements(self.layout.padded, self.mesh)
        return self.layout.cut(self.mesh.group_index(rank, residence.shard_axes) * num, num)


@dataclass(frozen=True)
class PlannedUnit:
    """The segments of a unit, whose rows differ in encodings only; ``inside`` are the names of the units around it.

    The root unit is called ``""``.
    """

    name: str
    segments: tuple[PlannedSegment, ...]
    inside: tuple[str, ...] = ()

    @property
    def row(self) -> StatePlan:
        return self.segments[0].row

    @property
    def rests_whole(self) -> bool:
        """As of its segments; a unit that does not borrows a slot of a buffer pool while it is used."""
        return self.segments[0].rests_whole

    @property
    def stays_whole(self) -> bool:
        return self.segments[0].stays_whole

    @cached_property
    def gathers_codes(self) -> bool:
        return any(segment.gathers_codes for segment in self.segments)

    @cached_property
    def num_bytes(self) -> int:
        """Of the whole unit in the compute encodings."""
        return sum(segment.layout.num_bytes for segment in self.segments)


def factor_elements(bucket: Sequence[PlannedSegment]) -> tuple[int, int]:
    """Values in the two messages in which a bucket's low-rank factors are summed."""
    sizes = [factors.num_elements for segment in bucket if (factors := segment.gradients.factors) is not None]
    return sum(left for left, _ in sizes), sum(right for _, right in sizes)


def reduction_order(units: Sequence[PlannedUnit]) -> list[PlannedSegment]:
    """The segments that train, last unit first: the order in which backward finishes them."""
    return [segment for unit in reversed(units) for segment in unit.segments if segment.trains]


def share_buckets(
    segments: Sequence[PlannedSegment], max_bytes: int = BUCKET_BYTES
) -> list[tuple[PlannedSegment, ...]]:
    """Which of the segments share a bucket, in the order in which buckets are reduced.

    Neighbours share one while they rest alike, with copies along the same axes, and fit in ``max_bytes``; those of
    which other stages have copies do not, as other stages have other neighbours. A gradient that the optimizer sees
    whole has a bucket of its own, so that it keeps its parameter's shape.
    """
    groups: list[list[PlannedSegment]] = []
    room, before = 0, None
    for segment in segments:
        rests = (segment.row.grad_step, segment.row.master.tier, segment.row.copies)
        if (
            rests == before
            and not segment.row.copies.is_tied
            and segment.gradients.num_bytes <= room
            and segment.num_shards(segment.row.grad_step) > 1
        ):
            groups[-1].append(segment)
            room -= segment.gradients.num_bytes
        else:
            groups.append([segment])
            room = max_bytes - segment.gradients.num_bytes
            before = rests
    return [tuple(group) for group in groups]
