"""Bytes that a rank needs beside its model states, at the most: slots, staging memory, what is on its way.

What autograd keeps for backward is not in it. Where the runtime's figure depends on details (which small gradients
share a bucket), this one is a bound that does not, so that it is the same for plans that differ only in them.
"""

from collections import Counter
from collections.abc import Sequence

from partita.plan.mesh_shape import MeshShape
from partita.plan.planned import BUCKET_BYTES, PlannedSegment, PlannedUnit
from partita.plan.residence import Tier
from partita.plan.slots import CLASS_SHARE, RECEIVING, SENDING, SUMMED, Passing, bytes_ahead, pool_depth, slot_counts
from partita.plan.steps import AllGather, AllReduce, ReduceScatter, steps

# Tensors of one kind that are on their way between disk and host at a time: of a unit that is updated, of the one that
# is read ahead, and of one whose last request is still under way.
STAGED = 3
# Gradients are only read by the update, and given back with it.
STAGED_GRADIENTS = 2


def working_bytes(
    units: Sequence[PlannedUnit], mesh: MeshShape, prefetch: int | str, num_moments: int
) -> dict[Tier, int]:
    """Bytes by tier. ``prefetch`` is ``zero.prefetch_bytes``."""
    needed = Counter[Tier]()
    needed[Tier.DEVICE] = (
        _pool_bytes(units, mesh, prefetch) + _gradient_bytes(units, mesh) + _publish_bytes(units, mesh)
    )
    needed[Tier.HOST] = _staging_bytes(units, mesh, num_moments) + _update_bytes(units, mesh)
    for tier in needed:
        needed[tier] += _sum_bytes(units, mesh, tier)
    return dict(needed)


def unit_bytes(unit: PlannedUnit) -> int:
    """Bytes of a whole unit in the compute encoding."""
    return sum(s.layout.padded * s.layout.encoding.itemsize for s in unit.segments)


def _pool_bytes(units: Sequence[PlannedUnit], mesh: MeshShape, prefetch: int | str) -> int:
    """The buffer pool of gathered units, as the runtime sizes it."""
    moving = [u for u in units if steps(u.segments[0].row.param_rest, u.segments[0].row.param_compute, mesh)]
    names = {unit.name for unit in moving}
    outer = {""} | {name[:end] for name in names for end in range(len(name)) if name[end] == "."}
    passing = [
        Passing(
            unit_bytes(unit),
            not unit.name,
            unit.name in outer and len(moving) > 1,
            not steps(unit.segments[0].row.param_compute, unit.segments[0].row.param_between, mesh),
        )
        for unit in moving
    ]
    depth = pool_depth(passing, bytes_ahead(prefetch, passing))
    lasting = [unit.num_bytes for unit in passing if unit.is_outer]
    return _total(slot_counts([unit.num_bytes for unit in passing], depth, lasting))


def _gradient_bytes(units: Sequence[PlannedUnit], mesh: MeshShape) -> int:
    """Slots of the buckets, and the gradients of one unit as autograd leaves them."""
    segments = [segment for unit in units for segment in unit.segments if segment.trains]
    sent, received = list[int](), list[int]()
    for segment in segments:
        row, num_bytes = segment.row, segment.layout.padded * segment.row.grad_step.encoding.itemsize
        arriving = steps(row.grad_arrival, row.grad_step, mesh)
        between = row.grad_between
        rests_whole = not arriving or (mesh.group_size(between.shard_axes) == 1 and between.tier is Tier.DEVICE)
        rests_whole = rests_whole and row.gradients_rest
        if not rests_whole:
            sent.append(num_bytes)
        for op in arriving:
            if isinstance(op, AllReduce | ReduceScatter):
                received.append(num_bytes - num_bytes // mesh.group_size(op.axes))
    moved = [sum(_arriving_bytes(segment, mesh) for segment in unit.segments if segment.trains) for unit in units]
    return _shared_slots(sent, SENDING) + _shared_slots(received, RECEIVING) + max(moved, default=0)


def _sum_bytes(units: Sequence[PlannedUnit], mesh: MeshShape, tier: Tier) -> int:
    """Slots of reduced gradients that rest nowhere."""
    segments = [segment for unit in units for segment in unit.segments if segment.trains]
    rows = [segment.row for segment in segments]
    passing = [not row.gradients_rest and row.grad_step.tier is tier for row in rows]
    sizes = [
        segment.layout.padded * row.grad_step.encoding.itemsize
        for segment, row, passes in zip(segments, rows, passing, strict=True)
        if passes
    ]
    return _shared_slots(sizes, SUMMED) // mesh.group_size(rows[0].grad_step.shard_axes) if rows else 0


def _arriving_bytes(segment: PlannedSegment, mesh: MeshShape) -> int:
    row = segment.row
    if not steps(row.grad_arrival, row.grad_step, mesh):
        return 0  # that is where they rest
    return segment.layout.padded * row.grad_arrival.encoding.itemsize


def _shared_slots(sizes: Sequence[int], depth: int) -> int:
    """Slots of the buckets that segments of these sizes are in. Whatever small ones share, a bucket of theirs has at
    most ``BUCKET_BYTES``, and the classes of such buckets are a falling geometric series.
    """
    large = [size for size in sizes if size > BUCKET_BYTES]
    small = sum(size for size in sizes if size <= BUCKET_BYTES)
    series = depth * min(small, BUCKET_BYTES) / (1 - CLASS_SHARE)
    return _total(slot_counts(large, depth)) + int(min(small / CLASS_SHARE, series))


def _publish_bytes(units: Sequence[PlannedUnit], mesh: MeshShape) -> int:
    """A unit made whole on the device on its way to where it rests whole, after an update."""
    return max(
        (
            segment.row.param_rest.num_bytes(segment.layout.padded, mesh)
            for unit in units
            for segment in unit.segments
            if segment.trains and segment.row.param_rest.tier is not Tier.DEVICE
            if any(isinstance(op, AllGather) for op in steps(segment.row.master, segment.row.param_rest, mesh))
        ),
        default=0,
    )


def _staging_bytes(units: Sequence[PlannedUnit], mesh: MeshShape, num_moments: int) -> int:
    """Host memory that what rests on disk passes through.

    Staging memory grows as it is asked for, so sizes that are close to each other may all come to have slots. A unit's
    update reads the whole bucket that holds its gradients, also what other units have in it.
    """
    parameters, gradients, optimizer = Counter[int](), Counter[int](), Counter[int]()
    small = 0
    for segment in (segment for unit in units for segment in unit.segments):
        row, padded = segment.row, segment.layout.padded
        if row.param_rest.tier is Tier.DISK:
            parameters[row.param_rest.num_bytes(padded, mesh)] += 1
        if segment.trains and row.grad_step.tier is Tier.DISK:
            num_bytes = row.grad_step.num_bytes(padded, mesh)
            if padded * row.grad_step.encoding.itemsize > BUCKET_BYTES:
                gradients[num_bytes] += 1
            else:
                small += num_bytes
        if segment.trains and row.master.tier is Tier.DISK:
            optimizer[row.master.num_bytes(padded, mesh)] += 1
            optimizer[row.moments.num_bytes(padded, mesh)] += num_moments
    return (
        _slots_of_each(parameters, STAGED)
        + _slots_of_each(gradients, STAGED_GRADIENTS)
        + _slots_of_each(optimizer, STAGED * (1 + num_moments))
        + STAGED_GRADIENTS * min(small, int(BUCKET_BYTES / (1 - CLASS_SHARE)))
    )


def _slots_of_each(sizes: Counter[int], depth: int) -> int:
    return sum(size * min(depth, num) for size, num in sizes.items())


def _update_bytes(units: Sequence[PlannedUnit], mesh: MeshShape) -> int:
    """The gradients of a unit that is updated off the device, as the optimizer asks for them."""
    away = [
        sum(s.row.master.num_bytes(s.layout.padded, mesh) for s in unit.segments if s.trains)
        for unit in units
        if not unit.segments[0].row.updates_on_device
    ]
    return max(away, default=0)


def _total(counts: dict[int, int]) -> int:
    return sum(size * num for size, num in counts.items())
