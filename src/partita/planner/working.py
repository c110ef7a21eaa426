"""Working memory: an upper bound of the bytes for slots, staging and transfers that a rank needs besides its states.

Activations that autograd keeps for backward are not included.
"""

from collections import Counter
from collections.abc import Sequence

from partita.plan.planned import PlannedSegment, PlannedUnit, reduction_order
from partita.plan.planned_bucket import BUCKET_BYTES, PlannedBucket, share_buckets
from partita.plan.residence import Tier
from partita.plan.slots import (
    CLASS_SHARE,
    RECEIVING,
    SENDING,
    SUMMED,
    PlannedPool,
    bucket_pools,
    unit_pool,
    unshard_scratch_bytes,
)

# Tensors of one kind that are on their way between disk and host at a time: of a unit that is updated, of the one that
# is read ahead, and of one whose last request is still under way.
STAGED = 3
# Gradients are only read by the update, and given back with it.
STAGED_GRADIENTS = 2


def working_bytes(
    units: Sequence[PlannedUnit], prefetch: int | str, num_moments: int, *, on_host: bool
) -> Counter[Tier]:
    """Return the working memory in bytes by tier.

    Args:
        prefetch: ``zero.prefetch_bytes``.
        on_host: the host's processors compute.
    """
    pools = bucket_pools(share_buckets(reduction_order(units)), in_pieces=on_host)
    passing = Counter({tier: pool.num_bytes for tier, pool in pools.summed.items()})
    passing[Tier.DEVICE] += pools.sending.num_bytes + pools.receiving.num_bytes
    return passing + _beside_gradients(units, prefetch, num_moments, on_host=on_host)


def most_working_bytes(
    units: Sequence[PlannedUnit], prefetch: int | str, num_moments: int, *, on_host: bool
) -> Counter[Tier]:
    """Return an upper bound of :func:`working_bytes` that does not depend on which small gradients share a bucket:
    moving a unit to another tier does not change the share of the other units.
    """
    trained = [segment for unit in units for segment in unit.segments if segment.trains]
    passing = Counter({tier: _most_summed(trained, tier) for tier in (Tier.DEVICE, Tier.HOST)})
    sent = [segment.gradients.num_bytes for segment in trained if segment.gradients.pass_through]
    received = [PlannedBucket((segment,)).scratch_bytes(in_pieces=on_host) for segment in trained]
    passing[Tier.DEVICE] += _shared_slots(sent, SENDING) + _shared_slots(received, RECEIVING)
    return passing + _beside_gradients(units, prefetch, num_moments, on_host=on_host)


def _beside_gradients(
    units: Sequence[PlannedUnit], prefetch: int | str, num_moments: int, *, on_host: bool
) -> Counter[Tier]:
    """Return the working memory except the buffer pools of gradients, by tier."""
    trained = [segment for unit in units for segment in unit.segments if segment.trains]
    device = unit_pool(units, prefetch).num_bytes + arriving_bytes(units) + unshard_scratch_bytes(units)
    device += _held_bytes(trained) + (0 if on_host else _publish_bytes(trained))
    return Counter({Tier.DEVICE: device, Tier.HOST: _staging_bytes(units, num_moments) + _update_bytes(units)})


def _held_bytes(trained: Sequence[PlannedSegment]) -> int:
    """Return the device memory that a reduction needs for states of its sync that are stored in another tier."""
    return max((segment.gradients.sync.working_bytes(segment.gradients) for segment in trained), default=0)


def arriving_bytes(units: Sequence[PlannedUnit]) -> int:
    """Return the bytes of the largest unit's gradients as autograd leaves them, without those that stay there."""
    moved = (
        sum(
            segment.layout.padded * segment.row.grad_arrival.encoding.itemsize
            for segment in unit.segments
            if segment.trains and segment.gradients.move
        )
        for unit in units
    )
    return max(moved, default=0)


def _most_summed(trained: Sequence[PlannedSegment], tier: Tier) -> int:
    """Return the bytes of the slots for reduced gradients that are not stored."""
    passing = [segment for segment in trained if segment.gradients.sums_tier is tier]
    if not passing:
        return 0
    num_shards = passing[0].num_shards(passing[0].row.grad_step)
    return _shared_slots([segment.gradients.num_bytes for segment in passing], SUMMED) // num_shards


def _shared_slots(sizes: Sequence[int], depth: int) -> int:
    """Return the bytes of the slots for the buckets of segments of these sizes. However small segments share buckets, a
    bucket of theirs has at most ``BUCKET_BYTES``, and the size classes of such buckets are a falling geometric series.
    """
    large = tuple(size for size in sizes if size > BUCKET_BYTES)
    small = sum(size for size in sizes if size <= BUCKET_BYTES)
    series = depth * min(small, BUCKET_BYTES) / (1 - CLASS_SHARE)
    return PlannedPool(large, depth).num_bytes + int(min(small / CLASS_SHARE, series))


def _publish_bytes(trained: Sequence[PlannedSegment]) -> int:
    """Return the bytes of the largest segment that is all-gathered on the device and then stored in another tier."""
    return max(
        (
            segment.held_bytes(segment.row.param_rest)
            for segment in trained
            if segment.row.param_rest.tier is not Tier.DEVICE and segment.update_is_gathered
        ),
        default=0,
    )


def _staging_bytes(units: Sequence[PlannedUnit], num_moments: int) -> int:
    """Return the host memory that states on disk pass through.

    Staging memory grows on demand, so sizes that are close to each other may all get slots. A unit's update reads the
    full bucket that holds its gradients, including those of other units.
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
            if segment.gradients.num_bytes > BUCKET_BYTES:
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
    """Return the bytes of the largest unit's gradients in the optimizer's form, of units updated off the device."""
    away = (
        sum(segment.held_bytes(segment.row.master) for segment in unit.segments if segment.trains)
        for unit in units
        if not unit.row.updates_on_device
    )
    return max(away, default=0)
