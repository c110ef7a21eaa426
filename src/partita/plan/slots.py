"""How many slots lend memory to what passes through the device: units that are gathered, gradients on their way.

Buffer pools (:mod:`partita.memory.buffer_pool`) are built from these numbers, and the estimates computed from them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from partita.plan.planned import PlannedSegment, PlannedUnit
from partita.plan.residence import Tier
from partita.plan.scratch import scratch_bytes

# Sizes down to this share of a class's size join the class instead of having slots of their own.
CLASS_SHARE = 0.75
# How many buckets of gradients may be filled or under way at a time. One part is received at a time. Of gradients that
# rest nowhere, one sum is used up while the next is made.
SENDING, RECEIVING, SUMMED = 2, 1, 2


@dataclass(frozen=True)
class PlannedPool:
    """A buffer pool for tensors of the given ``sizes`` in bytes.

    ``depth``: slots in a class of sizes; those whose sizes are ``lasting``, too, keep their slot while others come and
    go: each adds one.
    """

    sizes: tuple[int, ...]
    depth: int
    lasting: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return sum(size * num for size, num in self.slots().items())

    def slots(self) -> dict[int, int]:
        """How many by size: no more in a class than it serves of the ``sizes``."""
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
    """The smallest class that serves ``num_bytes``."""
    return min((size for size in classes if size >= num_bytes), default=None)


def bytes_ahead(units: Sequence[PlannedUnit], prefetch: int | str) -> int:
    """Bytes gathered ahead of their use, as ``zero.prefetch_bytes`` says; ``auto``: one unit (the largest but the root,
    which is whole throughout), or all where each has a slot of its own.
    """
    if isinstance(prefetch, int):
        return prefetch
    gathered = _gathered(units)
    if all(unit.stays_whole for unit in gathered):
        return sum(unit.num_bytes for unit in gathered)
    sizes = [unit.num_bytes for unit in gathered if unit.name] or [unit.num_bytes for unit in gathered]
    return max(sizes)


def unit_pool(units: Sequence[PlannedUnit], prefetch: int | str) -> PlannedPool:
    """The buffer pool of the units that do not rest whole. One that others lie inside of keeps its slot meanwhile.

    In backward a unit is opened before the one that follows it in forward is closed: two slots at the least.
    """
    gathered = _gathered(units)
    sizes = tuple(unit.num_bytes for unit in gathered)
    outer = {name for unit in gathered for name in unit.inside}
    depth = len(gathered)
    if not all(unit.stays_whole for unit in gathered):
        depth = 1 + max(1, -(-bytes_ahead(units, prefetch) // max(sizes)))
    return PlannedPool(sizes, depth, tuple(unit.num_bytes for unit in gathered if unit.name in outer))


@dataclass(frozen=True)
class BucketPools:
    """The buffer pools of buckets: of gradients that are collected and sent (``sending``), of what is received into
    them, and by tier of reduced gradients that rest nowhere (``summed``).
    """

    sending: PlannedPool
    receiving: PlannedPool
    summed: Mapping[Tier, PlannedPool]


def bucket_pools(buckets: Sequence[Sequence[PlannedSegment]], *, in_pieces: bool) -> BucketPools:
    """Those of ``buckets``, each of which has the segments that are reduced together. ``in_pieces`` as
    :func:`~partita.plan.scratch.received_elements` has it.
    """
    passing = [bucket for bucket in buckets if bucket[0].gradients.pass_through]
    of_each = dict[tuple[int, ...], int]()  # plans have one object for all segments that are alike
    for bucket in buckets:
        if (key := tuple(map(id, bucket))) not in of_each:
            of_each[key] = received_bytes(bucket, in_pieces=in_pieces)
    received = (of_each[tuple(map(id, bucket))] for bucket in buckets)
    return BucketPools(
        PlannedPool(tuple(sum(segment.gradients.num_bytes for segment in bucket) for bucket in passing), SENDING),
        PlannedPool(tuple(num_bytes for num_bytes in received if num_bytes), RECEIVING),
        {tier: PlannedPool(tuple(_sum_bytes(buckets, tier)), SUMMED) for tier in (Tier.DEVICE, Tier.HOST)},
    )


def received_bytes(bucket: Sequence[PlannedSegment], *, in_pieces: bool) -> int:
    """Scratch memory that a bucket's reductions need, in the first steps, too, and the way of the sums after them."""
    first, num_elements = bucket[0], sum(segment.layout.padded for segment in bucket)
    ways = [(phases[0], num_elements) for phases in (first.gradients.phases, first.gradients.warmup_phases)]
    carriage = first.gradients.average_steps(first.row.wires.sums) if first.gradients.send_averages else ()
    further = (first.gradients.copy_steps, first.gradients.phases[1], first.gradients.warmup_phases[1], carriage)
    ways += [(ops, num_elements // first.layout.num_parts) for ops in further]
    itemsize = first.row.grad_step.encoding.itemsize
    return max(scratch_bytes(ops, num, itemsize, first.mesh, in_pieces=in_pieces) for ops, num in ways)


def _sum_bytes(buckets: Sequence[Sequence[PlannedSegment]], tier: Tier) -> Iterator[int]:
    """Of a rank's part of each bucket's sum that passes through a pool in ``tier``."""
    for bucket in buckets:
        if bucket[0].gradients.sums_tier is tier:
            yield sum(segment.gradients.num_bytes for segment in bucket) // bucket[0].layout.num_parts


def code_bytes(units: Sequence[PlannedUnit]) -> int:
    """Of the codes that a unit's parameters come in: units are gathered one after the other."""
    return max((sum(segment.gathered_code_bytes for segment in unit.segments) for unit in units), default=0)


def _gathered(units: Sequence[PlannedUnit]) -> list[PlannedUnit]:
    return [unit for unit in units if not unit.rests_whole]
