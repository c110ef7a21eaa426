"""Numbers and sizes of the buffer pools' slots: for units that are unsharded, and for gradients that are being reduced.

Buffer pools (:mod:`partita.memory.buffer_pool`) are built from these numbers, and the estimates computed from them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from partita.table.planned import PlannedUnit
from partita.table.planned_bucket import PlannedBucket
from partita.table.residence import Tier

# Smaller sizes down to this fraction of a size class use its slots instead of their own.
CLASS_SHARE = 0.75
# Slots for buckets that are filled or reduced; for receiving, one at a time; and for reduced gradients that are not
# stored, one of which is used by an update during the next reduction.
SENDING, RECEIVING, SUMMED = 2, 1, 2


@dataclass(frozen=True)
class PlannedPool:
    """A buffer pool for tensors of the given ``sizes`` in bytes.

    ``depth``: slots per size class. A tensor whose size is also in ``lasting`` keeps its slot while others come and go:
    each adds one slot.
    """

    sizes: tuple[int, ...]
    depth: int
    lasting: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(size * num for size, num in self.slots().items())

    def slots(self) -> dict[int, int]:
        """Return the number of slots by size: in each class at most one for each of the ``sizes`` that it serves."""
        classes = list[int]()
        for size in sorted(self.sizes, reverse=True):
            if not classes or size < CLASS_SHARE * min(classes):
                classes.append(size)
        counts = {}
        for size in classes:
            served, kept = (
                sum(class_of(classes, other) == size for other in group) for group in (self.sizes, self.lasting)
            )
            counts[size] = min(self.depth + kept, served)
        return counts


def class_of(classes: Sequence[int], num_bytes: int) -> int | None:
    """Return the smallest class that serves ``num_bytes``; None if there is none."""
    return min((size for size in classes if size >= num_bytes), default=None)


def bytes_ahead(units: Sequence[PlannedUnit], prefetch: int | str) -> int:
    """Return the bytes gathered ahead of their use, as ``zero.prefetch_bytes`` says. ``auto``: one unit (the largest
    except the root, which is unsharded throughout), or all units if each has its own slot.
    """
    if isinstance(prefetch, int):
        return prefetch
    gathered = _gathered(units)
    if all(unit.stays_unsharded for unit in gathered):
        return sum(unit.num_bytes for unit in gathered)
    sizes = [unit.num_bytes for unit in gathered if unit.name] or [unit.num_bytes for unit in gathered]
    return max(sizes)


def unit_pool(units: Sequence[PlannedUnit], prefetch: int | str) -> PlannedPool:
    """Return the buffer pool of the units that have to be unsharded.

    A unit that contains others keeps its slot while they run. In backward a unit is unsharded before the one that
    follows it in forward is resharded: there are at least two slots.
    """
    gathered = _gathered(units)
    sizes = tuple(unit.num_bytes for unit in gathered)
    outer = {name for unit in gathered for name in unit.inside}
    depth = len(gathered)
    if not all(unit.stays_unsharded for unit in gathered):
        depth = 1 + max(1, -(-bytes_ahead(units, prefetch) // max(sizes)))
    return PlannedPool(sizes, depth, tuple(unit.num_bytes for unit in gathered if unit.name in outer))


@dataclass(frozen=True)
class BucketPools:
    """The buffer pools of buckets: for gradients that are collected and sent (``sending``), for what is received into
    them, and, by tier, for reduced gradients that are not stored (``summed``).
    """

    sending: PlannedPool
    receiving: PlannedPool
    summed: Mapping[Tier, PlannedPool]


def bucket_pools(buckets: Sequence[PlannedBucket], *, in_pieces: bool) -> BucketPools:
    """Return the pools of ``buckets``. ``in_pieces``: see :func:`~partita.table.scratch.received_elements`."""
    passing = [bucket for bucket in buckets if bucket.gradients.is_pooled]
    of_each = dict[tuple[int, ...], int]()  # equal segments are one object in plans
    received = list[int]()
    for bucket in buckets:
        key = tuple(map(id, bucket.segments))
        if key not in of_each:
            of_each[key] = bucket.scratch_bytes(in_pieces=in_pieces)
        received.append(of_each[key])
    return BucketPools(
        PlannedPool(tuple(bucket.num_bytes for bucket in passing), SENDING),
        PlannedPool(tuple(num_bytes for num_bytes in received if num_bytes), RECEIVING),
        {tier: PlannedPool(tuple(_sum_bytes(buckets, tier)), SUMMED) for tier in (Tier.DEVICE, Tier.HOST)},
    )


def _sum_bytes(buckets: Sequence[PlannedBucket], tier: Tier) -> Iterator[int]:
    """Yield the bytes of a rank's shard of each bucket's sum that uses a pool in ``tier``."""
    return (bucket.num_bytes // bucket.num_shards for bucket in buckets if bucket.gradients.sums_tier is tier)


def unshard_scratch_bytes(units: Sequence[PlannedUnit]) -> int:
    """Return the scratch memory of unsharding and publishing: units are unsharded one after the other."""
    return max((sum(segment.scratch_bytes for segment in unit.segments) for unit in units), default=0)


def _gathered(units: Sequence[PlannedUnit]) -> list[PlannedUnit]:
    return [unit for unit in units if not unit.always_unsharded]
