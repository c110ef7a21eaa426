"""The states that the gradient syncs of all buckets keep between steps: error-feedback residuals."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from torch import Tensor

from partita.sharding.buckets import Bucket
from partita.sharding.gradient_sync import GradientSync, StateOf
from partita.sharding.interpreter import Interpreter
from partita.sharding.segment import Segment


class SyncStates:
    """The states that syncs keep between steps, of all ``buckets`` (the list may grow)."""

    def __init__(self, buckets: list[Bucket], interpreter: Interpreter) -> None:
        self._buckets = buckets
        self._interpreter = interpreter

    def _with_states(self) -> Iterator[tuple[Bucket, GradientSync]]:
        """Yield the buckets whose sync after the warm-up uses error feedback."""
        return ((bucket, bucket.syncs[-1]) for bucket in self._buckets if bucket.syncs[-1].has_error_feedback)

    def __bool__(self) -> bool:
        """True if any sync keeps states. Sums are then scaled in place, including those of the warm-up."""
        return any(True for _ in self._with_states())

    def drop_unused(self, used: AbstractSet[int]) -> None:
        """Zero the reduced gradients of members that are not ``used`` (by id) on any rank."""
        for bucket, _ in self._with_states():
            bucket.drop_unused(used)

    def commit(self, used: AbstractSet[int]) -> None:
        """End a step with an update of the ``used`` members."""
        for bucket, sync in self._with_states():
            sync.commit(bucket.layout.pieces_of_unused(used))

    def prepare_for_checkpoint(self) -> None:
        """Reduce the states to what a checkpoint saves. A collective, between two steps."""
        for _, sync in self._with_states():
            sync.prepare_for_checkpoint(self._interpreter)

    def saved(self, segment: Segment) -> Tensor | None:
        """Return this rank's states of a segment, ``[shard_elements]``, for a checkpoint.

        Call :meth:`prepare_for_checkpoint` first.
        """
        for bucket, sync in self._with_states():
            if any(each is segment for each in bucket.segments):
                return sync.saved(segment)
        return None

    def start(self, state_of: StateOf) -> None:
        """Start the syncs after the warm-up or after loading states. A collective, between two steps."""
        for bucket, sync in self._with_states():
            sync.start(bucket.members, state_of, self._interpreter)

    def clear(self) -> None:
        """Forget all states, before other values are loaded."""
        for _, sync in self._with_states():
            sync.clear()
