"""How many slots lend memory to what passes through the device: units that are gathered, gradients on their way.

Buffer pools (:mod:`partita.memory.buffer_pool`) are built from these numbers, and the estimates computed from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Sizes down to this share of a class's size join the class instead of having slots of their own.
CLASS_SHARE = 0.75
# How many buckets of gradients may be filled or under way at a time. One part is received at a time. Of gradients that
# rest nowhere, one sum is used up while the next is made.
SENDING, RECEIVING, SUMMED = 2, 1, 2


@dataclass(frozen=True)
class Passing:
    """A unit that is gathered into a slot.

    ``stays_whole``: between forward and backward; ``is_outer``: others lie inside it, and come and go while it is open.
    """

    num_bytes: int
    is_root: bool
    is_outer: bool
    stays_whole: bool


def slot_counts(sizes: Sequence[int], depth: int, lasting: Sequence[int] = ()) -> dict[int, int]:
    """Slots by size: ``depth`` in a class, but no more than it serves of the ``sizes``; ``lasting`` ones add theirs."""
    classes = list[int]()
    for size in sorted(sizes, reverse=True):
        if not classes or size < CLASS_SHARE * min(classes):
            classes.append(size)
    counts = {}
    for size in classes:
        served, kept = (sum(class_of(classes, other) == size for other in group) for group in (sizes, lasting))
        counts[size] = min(depth + kept, served)
    return counts


def class_of(classes: Sequence[int], num_bytes: int) -> int | None:
    """The smallest class that serves ``num_bytes``."""
    return min((size for size in classes if size >= num_bytes), default=None)


def bytes_ahead(setting: int | str, units: Sequence[Passing]) -> int:
    """Bytes gathered ahead of their use; ``auto``: one unit (the largest but the root, which is whole throughout), or
    all where each has a slot of its own.
    """
    if isinstance(setting, int):
        return setting
    if all(unit.stays_whole for unit in units):
        return sum(unit.num_bytes for unit in units)
    sizes = [unit.num_bytes for unit in units if not unit.is_root] or [unit.num_bytes for unit in units]
    return max(sizes, default=0)


def pool_depth(units: Sequence[Passing], ahead: int) -> int:
    """Slots in a class of the pool of gathered units, beside those of units that others lie inside of.

    In backward a unit is opened before the one that follows it in forward is closed: two at the least.
    """
    if all(unit.stays_whole for unit in units):
        return len(units)
    return 1 + max(1, -(-ahead // max(unit.num_bytes for unit in units)))
