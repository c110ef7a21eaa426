"""The collective log: what this rank does in an order that must be every rank's, and where it parts from the others'.

A log is compared when a rank has waited too long; otherwise nothing is sent. What the others have shown may be old, but
is then the beginning of what their logs are now: a place that is known of two ranks and differs will always differ.
"""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.distributed_c10d import _get_default_store

from partita.errors import PartitaError

STEP = 0
# Events that are shown. A rank is ahead of another by no more gathers than it has slots for.
NUM_SHOWN = 256


class Board:
    """The latest note of each of ``num_ranks`` ranks, in the store behind ``torch.distributed``. Posting one waits for
    nobody, so it suits a rank that cannot know whether the others will ever answer a message.

    Args:
        topic: tells boards of one store apart.
    """

    def __init__(self, topic: str, rank: int, num_ranks: int) -> None:
        self._store = _get_default_store()
        self._keys = [f"partita/{topic}/{other}" for other in range(num_ranks)]
        self._own = self._keys[rank]
        self.post("")

    def post(self, note: str) -> None:
        """Replace this rank's note (at first: empty)."""
        with _explained():
            self._store.set(self._own, note)

    def read(self) -> list[str]:
        """Every rank's note, in rank order; waits for ranks that have not made the board yet."""
        with _explained():
            return [note.decode() for note in self._store.multi_get(self._keys)]


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PartitaError(
            "the process group's store, which lives with rank 0 or the launcher, is gone: that process ended; look at "
            f"its output first. Store: {error}"
        ) from error


class CollectiveLog:
    """The log of a mesh, for all engines on it: events are :data:`STEP`, or numbers of units that are gathered."""

    def __init__(self) -> None:
        self._descriptions = ["is at engine.step()"]
        self._recent: deque[int] = deque(maxlen=NUM_SHOWN)
        self.count = 0
        self.num_micro_batches = 0  # that have ended
        self.operation = ""  # the last collective
        self.board: Board | None = None
        self.has_named_late = False  # ranks that the others waited for

    def register(self, names: Sequence[str]) -> int:
        """Number the units of an engine; returns the first one's number. The same calls on every rank."""
        first = len(self._descriptions)
        self._descriptions += [f"gathers '{name}'" for name in names]
        return first

    def add(self, event: int) -> None:
        """This rank does ``event`` next."""
        self._recent.append(event)
        self.count += 1

    @property
    def doing(self) -> str:
        """Describe what this rank did last."""
        return f"{self.last} (last: {self.operation})" if self.operation else self.last

    @property
    def last(self) -> str:
        """The last event, as what this rank does."""
        return self.describe(self._recent[-1]) if self._recent else "has gathered nothing"

    def describe(self, event: int) -> str:
        """``event`` as what a rank does."""
        return self._descriptions[event]

    def difference(self) -> list[int | None] | None:
        """Show this log, and look at those that the others have shown: each rank's event (None: not known yet) at the
        first place where two differ; None if there is no such place.
        """
        assert self.board is not None, "there is no other rank"
        self.board.post(json.dumps([self.count, list(self._recent)]))
        logs: list[tuple[int, list[int]]] = [json.loads(note) if note else (0, []) for note in self.board.read()]
        firsts = [count - len(events) for count, events in logs]
        for place in range(max(firsts), max(count for count, _ in logs)):
            does = [
                events[place - first] if place < count else None
                for (count, events), first in zip(logs, firsts, strict=True)
            ]
            if len({event for event in does if event is not None}) > 1:
                return does
        return None
