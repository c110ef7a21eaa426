"""The gradients of a segment on paper: where they are collected, what they are summed by, and what that keeps."""

from dataclasses import dataclass, replace
from functools import cached_property

from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import FP32, Tier
from partita.plan.span import SegmentLayout
from partita.plan.state_plan import StatePlan
from partita.plan.steps import AllGather, ReduceScatter, Step, in_phases, on_wires, steps
from partita.plan.wire import FULL, Matrix, Wire, Wires, hops

Phases = tuple[tuple[Step, ...], tuple[Step, ...]]


@dataclass(frozen=True)
class PlannedFactors:
    """Sums of matrices as low-rank factors of ``rank`` columns, once codes travel."""

    layout: SegmentLayout
    rank: int

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """By name, the parameters of which factors travel; others travel as they are."""
        found = {span.fqn: Matrix.of(span.place.sizes) for span in self.layout.spans}
        return {fqn: matrix for fqn, matrix in found.items() if matrix.factor_columns(self.rank)}

    @property
    def num_elements(self) -> tuple[int, int]:
        """Values in the two messages of a sum: left factors with what travels as it is, and right ones."""
        left, right = sum(span.num_elements for span in self.layout.spans), 0
        for matrix in self.matrices.values():
            num = matrix.factor_columns(self.rank)
            left += matrix.rows * num - matrix.rows * matrix.columns
            right += matrix.columns * num
        return left, right


@dataclass(frozen=True)
class PlannedGradients:
    """Of one segment: its layout, its row of the table, and the mesh over which the row's axes are."""

    layout: SegmentLayout
    row: StatePlan
    mesh: MeshShape

    # ---------------------------------------------------------------- collecting

    @cached_property
    def move(self) -> bool:
        """Whether the optimizer's gradient is another than autograd's: elsewhere, encoded otherwise, or summed."""
        return bool(steps(self.row.grad_arrival, self.row.grad_step, self.mesh) or self.copy_steps)

    @property
    def in_place(self) -> bool:
        """Whether they stay where autograd leaves them, which is also where the optimizer looks for them."""
        return self.row.gradients_rest and not self.move

    @property
    def rest_whole(self) -> bool:
        """Whether they are collected in memory on the device that keeps them whole between micro-batches."""
        between = self.row.grad_between
        is_whole = self.mesh.group_size(between.shard_axes) == 1 and between.tier is Tier.DEVICE
        return self.row.gradients_rest and is_whole and not self.in_place

    @property
    def pass_through(self) -> bool:
        """Whether they are collected in a slot of a buffer pool, and leave it before the next micro-batch."""
        return not (self.in_place or self.rest_whole)

    @property
    def sums_tier(self) -> Tier | None:
        """The tier of the buffer pool that the sums go through; None: they rest."""
        return None if self.row.gradients_rest else self.row.grad_step.tier

    @property
    def num_bytes(self) -> int:
        """Of all parts as they are collected."""
        return self.layout.padded * self.row.grad_step.encoding.itemsize

    # ------------------------------------------------------------------- summing

    @cached_property
    def phases(self) -> Phases:
        """From gradients as they are collected (on the device, encoded as they rest) to the optimizer's: the steps to
        the sums, which every rank measures and scales its part of, and those that then bring the sums to where the
        optimizer works on more than this part.
        """
        return self._phases(self.row.wires)

    @cached_property
    def warmup_phases(self) -> Phases:
        """The same in the warm-up, where it has wires of its own."""
        return self._phases(self.row.wires.first or self.row.wires)

    def _phases(self, chosen: Wires) -> Phases:
        collected = replace(self.row.grad_arrival, encoding=self.row.grad_step.encoding)
        summed = replace(self.row.grad_step, shard_axes=self.row.part_axes)
        to_sums, further = (steps(*ends, self.mesh) for ends in ((collected, summed), (summed, self.row.grad_step)))
        wires = chosen.gradients, chosen.sums
        return in_phases(on_wires(to_sums, *wires)), in_phases(on_wires(further, *wires))

    @cached_property
    def reductions(self) -> tuple[ReduceScatter, ...]:
        """What of :attr:`phases` adds up over ranks."""
        return tuple(op for op in self.phases[0] if isinstance(op, ReduceScatter))

    @cached_property
    def copy_steps(self) -> tuple[Step, ...]:
        """From the sums that a rank measures to those over all copies."""
        summed = replace(self.row.grad_step, shard_axes=self.row.part_axes)
        return in_phases(steps(replace(summed, partial_axes=self.row.copies.axes), summed, self.mesh))

    @property
    def copy_factor(self) -> float:
        """What makes the mean over the copies whose gradients are equal, where all copies' are added up."""
        return 1.0 / self.mesh.group_size(self.row.copies.averaged)

    # --------------------------------------------------------------- compression

    @property
    def send_averages(self) -> bool:
        """Whether ranks send the optimizer's running average, which all of them then have."""
        return self.row.wires.momentum > 0 and bool(self.reductions)

    def average_steps(self, wire: Wire) -> tuple[Step, ...]:
        """From the averages, which a rank measures its part of, to those that all ranks have, in fp32 on the device."""
        summed = replace(self.row.grad_step, shard_axes=self.row.part_axes, encoding=FP32, tier=Tier.DEVICE)
        return on_wires(steps(summed, replace(summed, shard_axes=()), self.mesh), FULL, wire)

    @cached_property
    def factors(self) -> PlannedFactors | None:
        """Where sums of matrices are sums of low-rank factors."""
        rank = self.row.wires.factor_rank
        return PlannedFactors(self.layout, rank) if rank > 0 and self.reductions else None

    @property
    def error_sizes(self) -> tuple[int, ...]:
        """Elements of the errors that codes leave, in each sum over a group and in the gather of the sums, one after
        the other; empty where none are kept.
        """
        num_elements, sizes = self.layout.padded, list[int]()
        if self.factors is not None:
            return (num_elements,)
        further = self.average_steps(self.row.wires.sums) if self.send_averages else self.phases[1]
        for op in (*self.phases[0], *further):
            if isinstance(op, ReduceScatter):
                for axes in hops(op.axes, self.mesh) if op.wire.is_coded else (op.axes,):
                    sizes += [num_elements] if op.wire.feedback else []
                    num_elements //= self.mesh.group_size(axes)
            elif isinstance(op, AllGather):
                sizes += [num_elements] if op.wire.feedback else []
                num_elements *= self.mesh.group_size(op.axes)
        return tuple(sizes)

    @property
    def exact_sums(self) -> tuple[Step, ...]:
        """From errors, of which each rank has its own, to their sums, with nothing lost on the way."""
        held = replace(self.row.feedback, tier=Tier.DEVICE)
        return in_phases(steps(held, replace(held, shard_axes=self.row.part_axes, partial_axes=()), self.mesh))


@dataclass(frozen=True)
class PlannedRounds:
    """The rounds of replicas that train apart, of one segment."""

    layout: SegmentLayout
    row: StatePlan
    mesh: MeshShape

    def steps(self, wires: Wires) -> tuple[Step, ...]:
        """From the replicas' outer gradients to their sums, which all have."""
        src = self.row.outer_gradient
        return in_phases(on_wires(steps(src, replace(src, partial_axes=()), self.mesh), wires.outer, wires.outer_sums))

    @property
    def error_sizes(self) -> tuple[int, ...]:
        """Elements of the errors of outer gradients in codes: of a rank's own, and of the sums that it sends back."""
        if not self.row.wires.outer.feedback:
            return ()
        num_elements = self.layout.part_elements
        return num_elements, num_elements // self.mesh.group_size(self.row.apart_axes)

    @property
    def publication(self) -> tuple[Step, ...]:
        """From the parts that the outer optimizer updates to the master weights."""
        part = replace(self.row.master, shard_axes=self.row.part_axes)
        return steps(part, self.row.master, self.mesh)
