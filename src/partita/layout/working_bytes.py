"""Working memory: an upper bound of the bytes for slots, staging and transfers that a rank needs in addition to states.

Activations that autograd saves for backward are not included.
"""

from collections import Counter
from collections.abc import Sequence

from partita.layout.state_bytes import Moments
from partita.table.planned import PlannedSegment, PlannedUnit, reduction_order
from partita.table.planned_bucket import BUCKET_BYTES, PlannedBucket, share_buckets
from partita.table.residence import Tier
from partita.table.slots import (
    CLASS_SHARE,
    RECEIVING,
    SENDING,
    SUMMED,
    PlannedPool,
    bucket_pools,
    unit_pool,
    unshard_scratch_bytes,
)

# Number of tensors of one kind that move between disk and host at a time: of the unit that is updated, of the one that
# is prefetched, and of one that is being written.
STAGING_SLOTS = 3
# The update only reads gradients, and frees them.
GRADIENT_STAGING_SLOTS = 2


def working_bytes(
    units: Sequence[PlannedUnit], prefetch: int | str, moments: Moments, *, on_host: bool
) -> Counter[Tier]:
    """Return the working memory in bytes by tier.

    Args:
        prefetch: ``zero.prefetch_bytes``.
        on_host: training computes on the CPU.
    """
    buckets = share_buckets(reduction_order(units))
    pools = bucket_pools(buckets, in_pieces=on_host)
    buffers = Counter({tier: pool.num_bytes for tier, pool in pools.summed.items()})
    buffers[Tier.DEVICE] += pools.sending.num_bytes + pools.receiving.num_bytes
    if not on_host:  # the device measures a sum before it is copied to another tier
        leaving = (each.num_bytes // each.num_shards for each in buckets if each.row.grad_step.tier is not Tier.DEVICE)
        buffers[Tier.DEVICE] += max(leaving, default=0)
    return buffers + _other_buffers(units, prefetch, moments, on_host=on_host)


def most_working_bytes(
    units: Sequence[PlannedUnit], prefetch: int | str, moments: Moments, *, on_host: bool
) -> Counter[Tier]:
    """Return an upper bound of :func:`working_bytes` that does not depend on the buckets of small gradients.

    So a change of one unit's tier does not change the bytes of the other units.
    """
    trained = [segment for unit in units for segment in unit.segments if segment.trains]
    buffers = Counter({tier: _most_summed(trained, tier) for tier in (Tier.DEVICE, Tier.HOST)})
    sent = [segment.gradients.num_bytes for segment in trained if segment.gradients.is_pooled]
    received = [PlannedBucket((segment,)).scratch_bytes(in_pieces=on_host) for segment in trained]
    buffers[Tier.DEVICE] += _shared_slots(sent, SENDING) + _shared_slots(received, RECEIVING)
    buffers[Tier.DEVICE] += 0 if on_host else _most_leaving_bytes(trained)
    return buffers + _other_buffers(units, prefetch, moments, on_host=on_host)


def _other_buffers(
    units: Sequence[PlannedUnit], prefetch: int | str, moments: Moments, *, on_host: bool
) -> Counter[Tier]:
    """Return the working memory except the buffer pools of gradients, by tier."""
    trained = [segment for unit in units for segment in unit.segments if segment.trains]
    device = unit_pool(units, prefetch).num_bytes + autograd_gradient_bytes(units) + unshard_scratch_bytes(units)
    device += _sync_bytes(trained) + (0 if on_host else _publish_bytes(trained))
    return Counter({Tier.DEVICE: device, Tier.HOST: _staging_bytes(units, moments) + _update_bytes(units)})


def _sync_bytes(trained: Sequence[PlannedSegment]) -> int:
    """Return the device memory that a reduction needs for offloaded states of its gradient sync."""
    return max((segment.gradients.sync.working_bytes(segment.gradients) for segment in trained), default=0)


def autograd_gradient_bytes(units: Sequence[PlannedUnit]) -> int:
    """Return the bytes of the largest unit's gradients in ``param.grad``, without those that stay there."""
    moved = (
        sum(
            segment.layout.padded * segment.row.grad_arrival.encoding.itemsize
            for segment in unit.segments
            if segment.trains and segment.gradients.move
        )
        for unit in units
    )
    return max(moved, default=0)


def _most_leaving_bytes(trained: Sequence[PlannedSegment]) -> int:
    """Return an upper bound of the bytes of the largest shard of a sum that leaves the device for another tier."""
    largest, small = 0, Counter[int]()
    for segment in (each for each in trained if each.row.grad_step.tier is not Tier.DEVICE):
        num_bytes, num_shards = segment.gradients.num_bytes, segment.num_shards(segment.row.grad_step)
        largest = max(largest, num_bytes // num_shards)
        small[num_shards] += num_bytes if num_bytes <= BUCKET_BYTES else 0
    return max(largest, *(min(total, BUCKET_BYTES) // num_shards for num_shards, total in small.items()), 0)


def _most_summed(trained: Sequence[PlannedSegment], tier: Tier) -> int:
    """Return the bytes of the slots for reduced gradients that are not stored."""
    buffers = [segment for segment in trained if segment.gradients.sums_tier is tier]
    if not buffers:
        return 0
    num_shards = buffers[0].num_shards(buffers[0].row.grad_step)
    return _shared_slots([segment.gradients.num_bytes for segment in buffers], SUMMED) // num_shards


def _shared_slots(sizes: Sequence[int], depth: int) -> int:
    """Return the bytes of the slots for the buckets of segments of these sizes.

    A bucket of small segments has at most ``BUCKET_BYTES``. The size classes of such buckets are a falling geometric
    series.
    """
    large = tuple(size for size in sizes if size > BUCKET_BYTES)
    small = sum(size for size in sizes if size <= BUCKET_BYTES)
    series = depth * min(small, BUCKET_BYTES) / (1 - CLASS_SHARE)
    return PlannedPool(large, depth).num_bytes + int(min(small / CLASS_SHARE, series))


def _publish_bytes(trained: Sequence[PlannedSegment]) -> int:
    """Return the bytes of the largest offloaded segment whose update is all-gathered on the device."""
    return max(
        (
            segment.held_bytes(segment.row.param_stored)
            for segment in trained
            if segment.row.param_stored.tier is not Tier.DEVICE and segment.update_is_gathered
        ),
        default=0,
    )


def _staging_bytes(units: Sequence[PlannedUnit], moments: Moments) -> int:
    """Return the host memory for staging states on disk.

    Staging memory grows on demand, so similar sizes may all get slots. A unit's update reads the full bucket of its
    gradients, including those of other units.
    """
    parameters = Counter[int]()
    gradients = Counter[int]()
    optimizer = Counter[int]()
    small = 0
    for segment in (segment for unit in units for segment in unit.segments):
        row = segment.row
        if row.param_stored.tier is Tier.DISK:
            parameters[segment.held_bytes(row.param_stored)] += 1
        if segment.trains and row.grad_step.tier is Tier.DISK:
            num_bytes = segment.held_bytes(row.grad_step)
            if segment.gradients.num_bytes > BUCKET_BYTES:
                gradients[num_bytes] += 1
            else:
                small += num_bytes
        if segment.trains and row.master.tier is Tier.DISK:
            optimizer[segment.held_bytes(row.master)] += 1
            optimizer[segment.held_bytes(row.moments)] += moments.most
    return (
        _slots_of_each(parameters, STAGING_SLOTS)
        + _slots_of_each(gradients, GRADIENT_STAGING_SLOTS)
        + _slots_of_each(optimizer, STAGING_SLOTS * (1 + moments.most))
        + GRADIENT_STAGING_SLOTS * min(small, int(BUCKET_BYTES / (1 - CLASS_SHARE)))
    )


def _slots_of_each(sizes: Counter[int], depth: int) -> int:
    return sum(size * min(depth, num) for size, num in sizes.items())


def _update_bytes(units: Sequence[PlannedUnit]) -> int:
    """Return the bytes of the largest unit's gradients in the optimizer's dtype, among units updated on the host, and
    of their copies on the host if they are on the device in another encoding.
    """

    def num_bytes(segment: PlannedSegment) -> int:
        grad, master = segment.row.grad_step, segment.row.master
        is_copied = grad.tier is Tier.DEVICE and grad.encoding != master.encoding
        return segment.held_bytes(master) + (segment.held_bytes(grad) if is_copied else 0)

    off_device = (
        sum(num_bytes(segment) for segment in unit.segments if segment.trains)
        for unit in units
        if not unit.row.updates_on_device
    )
    return max(off_device, default=0)
