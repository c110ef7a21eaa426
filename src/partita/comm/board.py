"""Notes that ranks leave for each other, in the store behind ``torch.distributed``. Posting one waits for nobody, so it
suits a rank that cannot know whether the others will ever answer a message.
"""

from torch.distributed.distributed_c10d import _get_default_store

from partita.errors import PartitaError


class Board:
    """The latest note of each of ``num_ranks`` ranks; ``topic`` tells boards of one store apart."""

    def __init__(self, topic: str, rank: int, num_ranks: int) -> None:
        self._store = _get_default_store()
        self._keys = [f"partita/{topic}/{other}" for other in range(num_ranks)]
        self._own = self._keys[rank]
        self.post("")

    def post(self, note: str) -> None:
        """Replace this rank's note (at first: empty)."""
        try:
            self._store.set(self._own, note)
        except RuntimeError as error:
            raise _gone(error) from error

    def read(self) -> list[str]:
        """Every rank's note, in rank order; waits for ranks that have not made the board yet."""
        try:
            return [note.decode() for note in self._store.multi_get(self._keys)]
        except RuntimeError as error:
            raise _gone(error) from error


def _gone(error: RuntimeError) -> PartitaError:
    return PartitaError(
        "the process group's store, which lives with rank 0 or the launcher, is gone: that process ended; look at its "
        f"output first. Store: {error}"
    )
