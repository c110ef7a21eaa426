"""The plan of a segment's gradients: their buffers and their sums."""

from dataclasses import dataclass, replace
from functools import cached_property

from partita.table.mesh_shape import MeshShape
from partita.table.residence import Tier
from partita.table.span import SegmentLayout
from partita.table.state_plan import StatePlan
from partita.table.steps import ReduceScatter, Step, in_phases, steps
from partita.table.strategies import SyncPlan


@dataclass(frozen=True)
class PlannedGradients:
    """The plan of one segment's gradients, derived from its layout, its row of the table and the mesh."""

    layout: SegmentLayout
    row: StatePlan
    mesh: MeshShape

    # ---------------------------------------------------------------- collecting

    @cached_property
    def move(self) -> bool:
        """True if the optimizer's gradient is not autograd's: in another memory or encoding, or summed."""
        return bool(steps(self.row.grad_arrival, self.row.grad_step, self.mesh) or self.copy_steps)

    @property
    def in_place(self) -> bool:
        """True if gradients stay in ``.grad``, where the optimizer looks for them."""
        return self.row.stores_gradients and not self.move

    @property
    def is_resident(self) -> bool:
        """True if gradients are collected in a full buffer on the device that lasts between micro-batches."""
        between = self.row.grad_between
        is_whole = self.mesh.group_size(between.shard_axes) == 1 and between.tier is Tier.DEVICE
        return self.row.stores_gradients and is_whole and not self.in_place

    @property
    def is_pooled(self) -> bool:
        """True if gradients are collected in a slot of a buffer pool, for one micro-batch."""
        return not (self.in_place or self.is_resident)

    @property
    def sums_tier(self) -> Tier | None:
        """The tier of the buffer pool that reduced gradients pass through; None if gradients are stored."""
        return None if self.row.stores_gradients else self.row.grad_step.tier

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards in the encoding in which gradients are collected."""
        return self.layout.padded * self.row.grad_step.encoding.itemsize

    # ------------------------------------------------------------------- summing

    @cached_property
    def exact(self) -> SyncPlan:
        """The plan of the sum by the table's operations, with uncompressed values."""
        collected = replace(self.row.grad_arrival, encoding=self.row.grad_step.encoding)
        summed = replace(self.row.grad_step, shard_axes=self.row.gradient_shard_axes)
        to_sums, further = (steps(*ends, self.mesh) for ends in ((collected, summed), (summed, self.row.grad_step)))
        return SyncPlan(in_phases(to_sums), in_phases(further))

    @cached_property
    def syncs(self) -> tuple[SyncPlan, ...]:
        """The plans of the sums: in the warm-up, if that differs, and later."""
        return self.row.strategies.syncs(self)

    @property
    def sync(self) -> SyncPlan:
        """The plan of the sums after the warm-up."""
        return self.syncs[-1]

    @cached_property
    def reductions(self) -> tuple[ReduceScatter, ...]:
        """The reduce-scatters of :attr:`exact`."""
        return tuple(op for op in self.exact.sums if isinstance(op, ReduceScatter))

    @cached_property
    def copy_steps(self) -> tuple[Step, ...]:
        """The operations from the shard of a sum that a rank measures to the sum over all copies."""
        summed = replace(self.row.grad_step, shard_axes=self.row.gradient_shard_axes)
        return in_phases(steps(replace(summed, partial_axes=self.row.copies.axes), summed, self.mesh))

    @property
    def copy_factor(self) -> float:
        """Factor that turns the sum over copies into their mean, where copies have equal gradients."""
        return 1.0 / self.mesh.group_size(self.row.copies.averaged)
