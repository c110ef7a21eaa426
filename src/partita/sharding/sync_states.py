"""The states that the gradient syncs of all buckets keep between steps."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from torch import Tensor

from partita.sharding.buckets import Bucket
from partita.sharding.gradient_sync import GradientSync, StateOf
from partita.sharding.interpreter import Interpreter
from partita.sharding.unit import Segment


class SyncStates:
    """Ends steps, saves and loads for the syncs of all ``buckets``, of which more may come."""

    def __init__(self, buckets: list[Bucket], interpreter: Interpreter) -> None:
        self._buckets = buckets
        self._interpreter = interpreter

    def _kept(self) -> Iterator[tuple[Bucket, GradientSync]]:
        """The buckets whose sync, once the warm-up is over, keeps errors."""
        return ((bucket, bucket.syncs[-1]) for bucket in self._buckets if bucket.syncs[-1].keeps_errors)

    def __bool__(self) -> bool:
        """True if any sync keeps states. Sums are then scaled in place, also in the warm-up."""
        return any(True for _ in self._kept())

    def drop_unused(self, used: AbstractSet[int]) -> None:
        """All is reduced: gradients of members that are not ``used`` (by id) on any rank are zeros."""
        for bucket, sync in self._kept():
            if bucket.shard is not None:
                sync.drop_unused(bucket.shard.lend().tensor, bucket.layout.pieces_of_unused(used))

    def commit(self, used: AbstractSet[int]) -> None:
        """The step ends in an update of those that are ``used``."""
        for bucket, sync in self._kept():
            sync.commit(bucket.layout.pieces_of_unused(used))

    def settle(self) -> None:
        """Make what is saved all that there is. A collective, between two steps."""
        for _, sync in self._kept():
            sync.settle(self._interpreter)

    def saved(self, segment: Segment) -> Tensor | None:
        """Return this rank's part of a segment, ``[part_elements]``, for a checkpoint; call :meth:`settle` first."""
        for bucket, sync in self._kept():
            if any(each is segment for each in bucket.segments):
                return sync.saved(segment)
        return None

    def start(self, state_of: StateOf) -> None:
        """The warm-up is over, or states were loaded. A collective, between two steps."""
        for bucket, sync in self._kept():
            sync.start(bucket.members, state_of, self._interpreter)

    def clear(self) -> None:
        """Forget all, before other values are loaded."""
        for _, sync in self._kept():
            sync.clear()
