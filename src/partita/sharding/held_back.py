"""What codes of all gradients have held back, for who ends steps, saves and loads."""

from collections.abc import Set as AbstractSet

from torch import Tensor

from partita.sharding.buckets import Bucket
from partita.sharding.movement import Movement
from partita.sharding.unit import Segment


class HeldBack:
    """The feedback of all ``buckets``, of which more may come."""

    def __init__(self, buckets: list[Bucket], movement: Movement) -> None:
        self._buckets, self._movement = buckets, movement

    def __bool__(self) -> bool:
        """Whether codes hold back what they lose."""
        return any(bucket.feedback is not None for bucket in self._buckets)

    def leave_out_unused(self, used: AbstractSet[int]) -> None:
        """Once all is reduced: gradients that no rank has (``used`` are the ids of the others) are zeros."""
        for bucket in self._buckets:
            bucket.leave_out_unused(used)

    def commit(self, used: AbstractSet[int]) -> None:
        """The step ends in an update of those that are ``used``."""
        for bucket in self._buckets:
            bucket.commit(used)

    def flush(self) -> None:
        """Bring the sums to the ranks that gradients are summed up on, in full. A collective, between two steps."""
        for bucket in self._buckets:
            if bucket.feedback is not None:
                bucket.feedback.flush(self._movement)

    def of(self, segment: Segment) -> Tensor | None:
        """What is held of this rank's part of a segment, ``[part_elements]``: all there is after :meth:`flush`."""
        for bucket in self._buckets:
            if bucket.feedback is not None and any(each is segment for each in bucket.segments):
                return bucket.feedback.own_of(segment)
        return None

    def clear(self) -> None:
        """Hold nothing any more."""
        for bucket in self._buckets:
            if bucket.feedback is not None:
                bucket.feedback.clear()
