"""What codes of all gradients have held back, for who ends steps, saves and loads."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from torch import Tensor

from partita.sharding.buckets import Bucket
from partita.sharding.movement import Movement
from partita.sharding.unit import Member, Segment


class HeldBack:
    """The feedback of all ``buckets``, of which more may come."""

    def __init__(self, buckets: list[Bucket], movement: Movement) -> None:
        self._buckets, self._movement = buckets, movement

    def __bool__(self) -> bool:
        """Whether codes hold back what they lose."""
        return any(bucket.feedback is not None for bucket in self._buckets)

    @property
    def has_averages(self) -> bool:
        """Whether what travels are running averages."""
        return any(bucket.feedback is not None and bucket.feedback.average is not None for bucket in self._buckets)

    def leave_out_unused(self, used: AbstractSet[int]) -> None:
        """Once all is reduced: gradients that no rank has (``used`` are the ids of the others) are zeros."""
        for bucket in self._buckets:
            if bucket.feedback is not None and bucket.shard is not None:
                bucket.feedback.leave_out(bucket.shard.lend().tensor, bucket.layout.pieces_of_unused(used))

    def commit(self, used: AbstractSet[int]) -> None:
        """The step ends in an update of those that are ``used``."""
        for bucket in self._buckets:
            if bucket.feedback is not None:
                bucket.feedback.commit(bucket.layout.pieces_of_unused(used))

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

    def take_averages(self, average_of: Callable[[Member], Tensor | None]) -> None:
        """Have all ranks know the optimizer's running averages. A collective, between two steps.

        Args:
            average_of: what this rank has of a member's, flat, from its first element on.
        """
        for bucket in self._buckets:
            if bucket.feedback is not None:
                bucket.feedback.take_averages(bucket.members, average_of, self._movement)

    @property
    def has_carriers(self) -> bool:
        """Whether what travels is made of averages that follow from changes."""
        return any(bucket.feedback is not None and bucket.feedback.carrier is not None for bucket in self._buckets)

    def take_carriers(
        self, average_of: Callable[[Member], Tensor | None], divisor_of: Callable[[Member], Tensor | None]
    ) -> None:
        """Have the carriers of all ranks be the optimizer's running averages, and have all know by what it divides
        them. A collective, between two steps.

        Args:
            average_of: what this rank has of a member's, flat, from its first element on.
            divisor_of: the same of the divisors.
        """
        for bucket in self._buckets:
            if bucket.feedback is not None:
                bucket.feedback.take_carrier(bucket.members, average_of, divisor_of, self._movement)

    def take_out_carriers(self, rate_of: Callable[[Member], float]) -> None:
        """Make gradients of the sums, once these are measured and clipped.

        Args:
            rate_of: a member's learning rate in the update that comes.
        """
        for bucket in self._buckets:
            if bucket.feedback is not None and bucket.feedback.carrier is not None and bucket.shard is not None:
                bucket.feedback.carrier.note_rates(rate_of)
                bucket.feedback.take_out(bucket.shard.lend().tensor)

    def clear(self) -> None:
        """Hold nothing any more."""
        for bucket in self._buckets:
            if bucket.feedback is not None:
                bucket.feedback.clear()
