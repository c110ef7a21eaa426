"""What codes of all gradients have held back, for who ends steps, saves and loads."""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet

from torch import Tensor

from partita.sharding.buckets import Bucket
from partita.sharding.feedback import Feedback
from partita.sharding.movement import Movement
from partita.sharding.unit import Member, Segment


class HeldBack:
    """The feedback of all ``buckets``, of which more may come."""

    def __init__(self, buckets: list[Bucket], movement: Movement) -> None:
        self._buckets = buckets
        self._movement = movement

    def _held(self) -> Iterator[tuple[Bucket, Feedback]]:
        """The buckets whose codes hold back what they lose."""
        return ((bucket, bucket.feedback) for bucket in self._buckets if bucket.feedback is not None)

    def __bool__(self) -> bool:
        """Whether codes hold back what they lose."""
        return any(self._held())

    @property
    def has_averages(self) -> bool:
        """Whether what travels are running averages."""
        return any(feedback.average is not None for _, feedback in self._held())

    def leave_out_unused(self, used: AbstractSet[int]) -> None:
        """Once all is reduced: gradients that no rank has (``used`` are the ids of the others) are zeros."""
        for bucket, feedback in self._held():
            if bucket.shard is not None:
                feedback.leave_out(bucket.shard.lend().tensor, bucket.layout.pieces_of_unused(used))

    def commit(self, used: AbstractSet[int]) -> None:
        """The step ends in an update of those that are ``used``."""
        for bucket, feedback in self._held():
            feedback.commit(bucket.layout.pieces_of_unused(used))

    def flush(self) -> None:
        """Bring the sums to the ranks that gradients are summed up on, in full. A collective, between two steps."""
        for _, feedback in self._held():
            feedback.flush(self._movement)

    def of(self, segment: Segment) -> Tensor | None:
        """What is held of this rank's part of a segment, ``[part_elements]``: all there is after :meth:`flush`."""
        for bucket, feedback in self._held():
            if any(each is segment for each in bucket.segments):
                return feedback.own_of(segment)
        return None

    def take_averages(self, average_of: Callable[[Member], Tensor | None]) -> None:
        """Have all ranks know the optimizer's running averages. A collective, between two steps.

        Args:
            average_of: what this rank has of a member's, flat, from its first element on.
        """
        for bucket, feedback in self._held():
            feedback.take_averages(bucket.members, average_of, self._movement)

    def clear(self) -> None:
        """Hold nothing any more."""
        for _, feedback in self._held():
            feedback.clear()
