"""The plan of a model: the layout of each unit with its rows of the table.

The runtime is built from it, and the estimates are computed from it. All consequences of a row are defined here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from partita.table.mesh_shape import MeshShape
from partita.table.planned_gradients import PlannedGradients
from partita.table.residence import Residence, Tier
from partita.table.span import SegmentLayout, Span
from partita.table.state_plan import StatePlan
from partita.table.steps import AllGather, Step, steps
from partita.table.strategies import PublishPlan


@dataclass(frozen=True)
class PlannedSegment:
    """A flat buffer of a unit, its row of the table, and the mesh to which the row's axes refer."""

    layout: SegmentLayout
    row: StatePlan
    mesh: MeshShape

    @property
    def trains(self) -> bool:
        """True if the segment trained when the plan was made."""
        return self.layout.trainable

    @cached_property
    def always_unsharded(self) -> bool:
        """True if parameters are stored as they are computed with: no unshard is needed."""
        return not steps(self.row.param_stored, self.row.param_compute, self.mesh)

    @cached_property
    def stays_unsharded(self) -> bool:
        """True if parameters stay unsharded between forward and backward."""
        return not steps(self.row.param_compute, self.row.param_between, self.mesh)

    @cached_property
    def has_secondary(self) -> bool:
        """True if there is a secondary shard between forward and backward (hpZ), other than the stored one."""
        return self.num_shards(self.row.param_between) not in (1, self.num_shards(self.row.param_stored))

    @cached_property
    def master_is_parameter(self) -> bool:
        """True if the master weights are the stored parameters, or a part of them."""
        stored, master = self.row.param_stored, self.row.master
        same = (stored.encoding, stored.tier) == (master.encoding, master.tier)
        same = same and not any(publish.needs_master for publish in self.publishes)
        if same and stored.tier is Tier.DISK:  # a state on disk is read and written as one
            same = self.num_shards(stored) == self.num_shards(master)
        return same

    @cached_property
    def publication(self) -> tuple[Step, ...]:
        """The operations from updated master weights to the stored parameters, as the table defines them."""
        return steps(self.row.master, self.row.param_stored, self.mesh)

    @cached_property
    def update_is_gathered(self) -> bool:
        """True if publishing updated master weights in the stored parameters takes an all-gather."""
        return any(isinstance(op, AllGather) for op in self.publication)

    @cached_property
    def publishes(self) -> tuple[PublishPlan, ...]:
        """The plans by which updated weights are published: in the warm-up, if that differs, and later."""
        return self.row.strategies.publishes(self)

    @property
    def publish(self) -> PublishPlan:
        """The plan by which updated weights are published after the warm-up."""
        return self.publishes[-1]

    @cached_property
    def unshards(self) -> tuple[Step, ...]:
        """The operations from the stored parameters to those in compute."""
        return self.row.strategies.unshard(steps(self.row.param_stored, self.row.param_compute, self.mesh))

    @cached_property
    def unshards_exactly(self) -> bool:
        """True if parameters in compute have the values of the stored ones."""
        return all(op.format.is_exact for op in self.unshards if isinstance(op, AllGather))

    @cached_property
    def scratch_bytes(self) -> int:
        """Device memory that unsharding and publishing need besides the parameters."""
        gathered = [op for op in self.unshards if isinstance(op, AllGather)]
        needed = [op.format.gather_scratch_bytes(self.layout.padded) for op in gathered]
        needed += [publish.scratch_bytes(self) for publish in self.publishes]
        return max(needed, default=0)

    @cached_property
    def gradients(self) -> PlannedGradients:
        """The plan of the segment's gradients."""
        return PlannedGradients(self.layout, self.row, self.mesh)

    def is_first_copy(self, rank: int) -> bool:
        """Return whether ``rank`` saves its shard, among the ranks with the same shard."""
        return all(
            self.mesh.coordinate(rank, axis) == 0 for axis in (*self.row.all_replica_axes, *self.row.copies.axes)
        )

    def is_first_owner(self, rank: int) -> bool:
        """Return whether ``rank`` saves the states of the full parameters that it owns, among the ranks that own the
        same ones: those with the same master weights.
        """
        axes = (*self.row.separate_axes, *self.row.master_replica_axes, *self.row.copies.axes)
        return all(self.mesh.coordinate(rank, axis) == 0 for axis in axes)

    def is_first_of_replica(self, rank: int) -> bool:
        """Return whether ``rank`` is the first in its replica with its shard.

        Replicas that train separately measure their gradients separately.
        """
        return all(
            self.mesh.coordinate(rank, axis) == 0 for axis in (*self.row.gradient_replica_axes, *self.row.copies.axes)
        )

    def num_shards(self, residence: Residence) -> int:
        """Return the number of ranks over which ``residence`` shards a state."""
        return self.mesh.group_size(residence.shard_axes)

    def held_bytes(self, residence: Residence) -> int:
        """Return the bytes that a rank stores under ``residence``, padding included."""
        return residence.num_bytes(self.layout.padded, self.mesh)

    def spans_of(self, residence: Residence, rank: int) -> tuple[Span, ...]:
        """Return the spans that ``rank`` stores under ``residence``, with offsets from the start of its shard."""
        num = residence.num_elements(self.layout.padded, self.mesh)
        return self.layout.cut(self.mesh.group_index(rank, residence.shard_axes) * num, num)


@dataclass(frozen=True)
class PlannedUnit:
    """The segments of a unit, whose rows differ in encodings only; ``inside`` are the names of the enclosing units.

    The root unit is called ``""``.
    """

    name: str
    segments: tuple[PlannedSegment, ...]
    inside: tuple[str, ...] = ()

    @property
    def row(self) -> StatePlan:
        return self.segments[0].row

    @property
    def always_unsharded(self) -> bool:
        """True if parameters are stored unsharded; other units borrow a slot of a buffer pool while in use."""
        return self.segments[0].always_unsharded

    @property
    def stays_unsharded(self) -> bool:
        return self.segments[0].stays_unsharded

    @cached_property
    def unshards_exactly(self) -> bool:
        """True if parameters in compute have the values of the stored ones."""
        return all(segment.unshards_exactly for segment in self.segments)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the unsharded unit in the compute encodings."""
        return sum(segment.layout.num_bytes for segment in self.segments)


def reduction_order(units: Sequence[PlannedUnit]) -> list[PlannedSegment]:
    """Return the segments that train, last unit first: the order in which backward completes them."""
    return [segment for unit in reversed(units) for segment in unit.segments if segment.trains]
