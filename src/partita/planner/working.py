"""Bytes that a rank needs beside its model states, at the most: slots, staging memory, what is on its way.

What autograd keeps for backward is not in it. Where the runtime's figure depends on details (which small gradients
share a bucket), this one is a bound that does not, so that it is the same for plans that differ only in them.
"""

from collections import Counter
from collections.abc import Sequence

from partita.plan.planned import BUCKET_BYTES, PlannedSegment, PlannedUnit
from partita.plan.residence import FP32, Tier
from partita.plan.slots import CLASS_SHARE, RECEIVING, SENDING, SUMMED, PlannedPool, code_bytes, unit_pool

# Tensors of one kind that are on their way between disk and host at a time: of a unit that is updated, of the one that
# is read ahead, and of one whose last request is still under way.
STAGED = 3
# Gradients are only read by the update, and given back with it.
STAGED_GRADIENTS = 2


def working_bytes(units: Sequence[PlannedUnit], prefetch: int | str, num_moments: int) -> Counter[Tier]:
    """Bytes by tier. ``prefetch`` is ``zero.prefetch_bytes``."""
    trained = [segment for unit in units for segment in unit.segments if segment.trains]
    device = unit_pool(units, prefetch).num_bytes + _bucket_bytes(trained) + arriving_bytes(units)
    host = _staging_bytes(units, num_moments) + _update_bytes(units) + _sum_bytes(trained, Tier.HOST)
    device += _held_bytes(trained) + _publish_bytes(trained) + _sum_bytes(trained, Tier.DEVICE) + code_bytes(units)
    return Counter({Tier.DEVICE: device, Tier.HOST: host})


def _bucket_bytes(trained: Sequence[PlannedSegment]) -> int:
    """Slots of the buckets, and of what is received into them."""
    sent, received = list[int](), list[int]()
    for segment in trained:
        if segment.gradient_passes:
            sent.append(segment.gradient_bytes)
        if segment.received_bytes:
            received.append(segment.received_bytes)
    return _shared_slots(sent, SENDING) + _shared_slots(received, RECEIVING)


def _held_bytes(trained: Sequence[PlannedSegment]) -> int:
    """What codes of a bucket hold back, on the device, where it rests elsewhere."""
    away = (segment for segment in trained if segment.row.feedback.tier is not Tier.DEVICE)
    return max((sum(map(FP32.num_bytes, segment.held_sizes)) for segment in away), default=0)


def arriving_bytes(units: Sequence[PlannedUnit]) -> int:
    """The gradients of one unit as autograd leaves them, where they do not stay there."""
    moved = (
        sum(
            segment.layout.padded * segment.row.grad_arrival.encoding.itemsize
            for segment in unit.segments
            if segment.trains and segment.gradient_moves
        )
        for unit in units
    )
    return max(moved, default=0)


def _sum_bytes(trained: Sequence[PlannedSegment], tier: Tier) -> int:
    """Slots of reduced gradients that rest nowhere."""
    passing = [s for s in trained if not s.row.gradients_rest and s.row.grad_step.tier is tier]
    if not passing:
        return 0
    num_shards = passing[0].num_shards(passing[0].row.grad_step)
    return _shared_slots([segment.gradient_bytes for segment in passing], SUMMED) // num_shards


def _shared_slots(sizes: Sequence[int], depth: int) -> int:
    """Slots of the buckets that segments of these sizes are in. Whatever small ones share, a bucket of theirs has at
    most ``BUCKET_BYTES``, and the classes of such buckets are a falling geometric series.
    """
    large = tuple(size for size in sizes if size > BUCKET_BYTES)
    small = sum(size for size in sizes if size <= BUCKET_BYTES)
    series = depth * min(small, BUCKET_BYTES) / (1 - CLASS_SHARE)
    return PlannedPool(large, depth).num_bytes + int(min(small / CLASS_SHARE, series))


def _publish_bytes(trained: Sequence[PlannedSegment]) -> int:
    """A segment made whole on the device on its way to where it rests whole, after an update."""
    return max(
        (
            segment.held_bytes(segment.row.param_rest)
            for segment in trained
            if segment.row.param_rest.tier is not Tier.DEVICE and segment.update_is_gathered
        ),
        default=0,
    )


def _staging_bytes(units: Sequence[PlannedUnit], num_moments: int) -> int:
    """Host memory that what rests on disk passes through.

    Staging memory grows as it is asked for, so sizes that are close to each other may all come to have slots. A unit's
    update reads the whole bucket that holds its gradients, also what other units have in it.
    """
    parameters = Counter[int]()
    gradients = Counter[int]()
    optimizer = Counter[int]()
    small = 0
    for segment in (segment for unit in units for segment in unit.segments):
        row = segment.row
        if row.param_rest.tier is Tier.DISK:
            parameters[segment.held_bytes(row.param_rest)] += 1
        if segment.trains and row.grad_step.tier is Tier.DISK:
            num_bytes = segment.held_bytes(row.grad_step)
            if segment.gradient_bytes > BUCKET_BYTES:
                gradients[num_bytes] += 1
            else:
                small += num_bytes
        if segment.trains and row.master.tier is Tier.DISK:
            optimizer[segment.held_bytes(row.master)] += 1
            optimizer[segment.held_bytes(row.moments)] += num_moments
    return (
        _slots_of_each(parameters, STAGED)
        + _slots_of_each(gradients, STAGED_GRADIENTS)
        + _slots_of_each(optimizer, STAGED * (1 + num_moments))
        + STAGED_GRADIENTS * min(small, int(BUCKET_BYTES / (1 - CLASS_SHARE)))
    )


def _slots_of_each(sizes: Counter[int], depth: int) -> int:
    return sum(size * min(depth, num) for size, num in sizes.items())


def _update_bytes(units: Sequence[PlannedUnit]) -> int:
    """The gradients of a unit that is updated off the device, as the optimizer asks for them."""
    away = (
        sum(segment.held_bytes(segment.row.master) for segment in unit.segments if segment.trains)
        for unit in units
        if not unit.row.updates_on_device
    )
    return max(away, default=0)
