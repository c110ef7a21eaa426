"""A model on paper: the layout of each unit with its rows of the table, and which gradients are reduced together.

The runtime is built from it, and the estimates are computed from it: what follows from a row is said here, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import FP32, Residence, Tier
from partita.plan.span import SegmentLayout, Span
from partita.plan.state_plan import StatePlan
from partita.plan.steps import AllGather, ReduceScatter, Step, in_phases, on_wires, steps
from partita.plan.wire import AS_THEY_ARE, FULL, Matrix, Wire, Wires, hops

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
    def first_publication(self) -> tuple[Step, ...]:
        """The same in the first steps."""
        return self._publication(self.first_wires)

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
            coded = [wire for wire in (self.row.wires.changes, self.first_wires.changes) if wire.is_coded]
            return max(wire.num_bytes(rest) for wire in coded) + FP32.num_bytes(own)
        return self.row.wires.parameters.num_bytes(self.layout.padded) if self.gathers_codes else 0

    @cached_property
    def gradient_moves(self) -> bool:
        """Whether the optimizer's gradient is another than autograd's: elsewhere, encoded otherwise, or summed."""
        return bool(steps(self.row.grad_arrival, self.row.grad_step, self.mesh) or self.copy_steps)

    @property
    def gradient_in_place(self) -> bool:
        """Whether gradients rest where autograd leaves them, which is also where the optimizer looks for them."""
        return self.row.gradients_rest and not self.gradient_moves

    @property
    def gradient_rests_whole(self) -> bool:
        """Whether gradients are collected in memory on the device that keeps them whole between micro-batches."""
        between = self.row.grad_between
        is_whole = self.num_shards(between) == 1 and between.tier is Tier.DEVICE
        return self.row.gradients_rest and is_whole and not self.gradient_in_place

    @property
    def gradient_passes(self) -> bool:
        """Whether gradients are collected in a slot of a buffer pool, and leave it before the next micro-batch."""
        return not (self.gradient_in_place or self.gradient_rests_whole)

    @property
    def sums_pass(self) -> Tier | None:
        """The tier of the buffer pool that reduced gradients go through; None: they rest."""
        return None if self.row.gradients_rest else self.row.grad_step.tier

    @property
    def first_wires(self) -> Wires:
        """What travels in the first steps."""
        return self.row.wires.first or AS_THEY_ARE

    @property
    def carries(self) -> bool:
        """Whether all ranks have the optimizer's running average, of which what they send is made."""
        return self.row.wires.momentum > 0 and bool(self.gradient_reductions)

    def carriage(self, wire: Wire) -> tuple[Step, ...]:
        """From the sums, which a rank measures its part of, to those that all ranks have, in fp32 on the device."""
        summed = replace(self.row.grad_step, shard_axes=self.row.part_axes, encoding=FP32, tier=Tier.DEVICE)
        return on_wires(steps(summed, replace(summed, shard_axes=()), self.mesh), FULL, wire)

    @cached_property
    def gradient_phases(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """From gradients as they are collected (on the device, encoded as they rest) to the optimizer's: the steps to
        the sums, which every rank measures and scales its part of, and those that then bring the sums to where the
        optimizer works on more than this part.
        """
        return self._phases(self.row.wires)

    @cached_property
    def first_gradient_phases(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """The same in the first steps, where these have wires of their own."""
        return self._phases(self.row.wires.first or self.row.wires)

    def _phases(self, chosen: Wires) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        collected = replace(self.row.grad_arrival, encoding=self.row.grad_step.encoding)
        summed = replace(self.row.grad_step, shard_axes=self.row.part_axes)
        to_sums, further = (steps(*ends, self.mesh) for ends in ((collected, summed), (summed, self.row.grad_step)))
        wires = chosen.gradients, chosen.sums
        return in_phases(on_wires(to_sums, *wires)), in_phases(on_wires(further, *wires))

    @property
    def gradient_reductions(self) -> tuple[ReduceScatter, ...]:
        """What of :attr:`gradient_phases` adds up over ranks."""
        return tuple(op for op in self.gradient_phases[0] if isinstance(op, ReduceScatter))

    @cached_property
    def copy_steps(self) -> tuple[Step, ...]:
        """From the sums that a rank measures to those over all copies."""
        summed = replace(self.row.grad_step, shard_axes=self.row.part_axes)
        return in_phases(steps(replace(summed, partial_axes=self.row.copies.axes), summed, self.mesh))

    @property
    def copy_factor(self) -> float:
        """What makes the mean over the copies whose gradients are equal, where all copies' are added up."""
        return 1.0 / self.mesh.group_size(self.row.copies.averaged)

    def is_first_copy(self, rank: int) -> bool:
        """Whether, of the ranks that have the same part of the states, ``rank`` is the one that saves."""
        return all(self.mesh.coordinate(rank, axis) == 0 for axis in (*self.row.alike_axes, *self.row.copies.axes))

    def is_first_of_replica(self, rank: int) -> bool:
        """The same among the ranks of one replica, where these train apart: each measures its own gradients."""
        return all(self.mesh.coordinate(rank, axis) == 0 for axis in (*self.row.replica_axes, *self.row.copies.axes))

    def outer_steps(self, *, in_full: bool = False) -> tuple[Step, ...]:
        """From the replicas' outer gradients to their sums, which all have; ``in_full``: in the first steps."""
        src, wires = self.row.outer_gradient, self.first_wires if in_full else self.row.wires
        return in_phases(on_wires(steps(src, replace(src, partial_axes=()), self.mesh), wires.outer, wires.outer_sums))

    @property
    def outer_held_sizes(self) -> tuple[int, ...]:
        """Elements of what codes of outer gradients hold back: of a rank's own, and of the sums that it sends back."""
        if not self.row.wires.outer.feedback:
            return ()
        num_elements = self.layout.part_elements
        return num_elements, num_elements // self.mesh.group_size(self.row.apart_axes)

    @property
    def outer_publication(self) -> tuple[Step, ...]:
        """From the parts that the outer optimizer updates to the master weights."""
        part = replace(self.row.master, shard_axes=self.row.part_axes)
        return steps(part, self.row.master, self.mesh)

    @property
    def sums_factors(self) -> bool:
        """Whether sums of matrices are sums of low-rank factors, once codes travel."""
        return self.row.wires.factor_rank > 0 and bool(self.gradient_reductions)

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """By name, the parameters of which low-rank factors travel."""
        rank = self.row.wires.factor_rank
        found = {span.fqn: Matrix.of(span.place.sizes) for span in self.layout.spans}
        return {fqn: matrix for fqn, matrix in found.items() if self.sums_factors and matrix.factor_columns(rank)}

    @property
    def factor_elements(self) -> tuple[int, int]:
        """Values in the two messages of a sum of factors: left ones with what travels as it is, and right ones."""
        left, right = sum(span.num_elements for span in self.layout.spans), 0
        for matrix in self.matrices.values():
            num = matrix.factor_columns(self.row.wires.factor_rank)
            left += matrix.rows * num - matrix.rows * matrix.columns
            right += matrix.columns * num
        return left, right

    @property
    def held_sizes(self) -> tuple[int, ...]:
        """Elements of what codes of gradients hold back, in each sum over a group and in the gather of the sums, one
        after the other.
        """
        num_elements, sizes = self.layout.padded, list[int]()
        if self.sums_factors:
            return (num_elements,)
        further = self.carriage(self.row.wires.sums) if self.carries else self.gradient_phases[1]
        for op in (*self.gradient_phases[0], *further):
            if isinstance(op, ReduceScatter):
                for axes in hops(op.axes, self.mesh) if op.wire.is_coded else (op.axes,):
                    sizes += [num_elements] if op.wire.feedback else []
                    num_elements //= self.mesh.group_size(axes)
            elif isinstance(op, AllGather):
                sizes += [num_elements] if op.wire.feedback else []
                num_elements *= self.mesh.group_size(op.axes)
        return tuple(sizes)

    @property
    def full_sums(self) -> tuple[Step, ...]:
        """From values that all ranks add to, on the device in fp32, to the sums, with nothing lost on the way."""
        held = replace(self.row.feedback, tier=Tier.DEVICE)
        return in_phases(steps(held, replace(held, shard_axes=self.row.part_axes, partial_axes=()), self.mesh))

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients of all parts as they are collected."""
        return self.layout.padded * self.row.grad_step.encoding.itemsize

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
            and segment.gradient_bytes <= room
            and segment.num_shards(segment.row.grad_step) > 1
        ):
            groups[-1].append(segment)
            room -= segment.gradient_bytes
        else:
            groups.append([segment])
            room = max_bytes - segment.gradient_bytes
            before = rests
    return [tuple(group) for group in groups]
