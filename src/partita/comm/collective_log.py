"""The collective log: the steps and all-gathers of this rank, which every rank must perform in the same order.

Logs are compared only when a rank has waited too long; until then nothing is sent. A published log may be out of date,
but it is a prefix of the rank's current log, so a difference between two published logs is final.
"""

import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.distributed_c10d import _get_default_store

from partita.comm.node.forks import connections_kept_from_children
from partita.errors import PartitaError

STEP = 0
UPDATE = 1
# Number of events that are published. A rank is never further ahead of another than its number of unshard slots.
NUM_SHOWN = 256
# Number of events that :class:`Successors` keeps at least: more than those of a step.
MOST_EVENTS = 2**16
# Number of steps, of places, and of events before each place that it compares after an unexpected event.
NUM_STEPS, MOST_COMPARED = 16, 256


class Board:
    """The latest note of each of ``num_ranks`` ranks, in the store of ``torch.distributed``. Posting does not block,
    unlike a collective, so it works even if the other ranks hang.

    Args:
        topic: prefix of the keys; distinguishes several boards in one store.
    """

    def __init__(self, topic: str, rank: int, num_ranks: int) -> None:
        with connections_kept_from_children():
            # Its own connection: the watchdog posts while the main thread may wait for the store.
            self._store = _get_default_store().clone()  # type: ignore[attr-defined]  # torch's stubs do not know it
        self._keys = [f"partita/{topic}/{other}" for other in range(num_ranks)]
        self._own = self._keys[rank]
        self.post("")

    def post(self, note: str) -> None:
        """Replace this rank's note (at first: empty)."""
        with _error_context():
            self._store.set(self._own, note)

    def read(self) -> list[str]:
        """Return every rank's note, in rank order; waits for ranks that have not made the board yet."""
        with _error_context():
            return [note.decode() for note in self._store.multi_get(self._keys)]


@contextmanager
def _error_context() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PartitaError(
            "the process group's store, which lives with rank 0 or the launcher, is gone: that process ended; look at "
            f"its output first. Store: {error}"
        ) from error


class Successors:
    """Predicts the next event of a log from earlier steps. Each step ends with :data:`UPDATE`.

    The next event is that of the latest step which began with the events of the current one. If there is none, it is
    the event after the latest occurrence of the longest matching sequence. The prediction depends only on the log, so
    ranks with equal logs predict the same event.
    """

    def __init__(self) -> None:
        self._events: list[int] = []
        self._num_dropped = 0  # events that were dropped from the beginning; places count them
        self._next: int | None = None  # the place of the expected event
        self._starts = deque([0], maxlen=NUM_STEPS)  # the places where steps begin, up to the current one
        self._places = defaultdict[int, deque[int]](lambda: deque(maxlen=MOST_COMPARED))  # of each event

    def expect(self, event: int) -> bool:
        """Return True if ``event`` is the predicted one."""
        return self._next is not None and self._events[self._next - self._num_dropped] == event

    def add(self, event: int) -> None:
        """Add the next event."""
        is_expected = self.expect(event)
        self._events.append(event)
        end = self._num_dropped + len(self._events)
        if event == UPDATE:
            self._next = self._starts[-1]
            self._starts.append(end)
        elif is_expected:
            assert self._next is not None
            self._next += 1
        else:
            self._next = self._after_same_beginning() or self._after_longest_match(event)
        self._places[event].append(end - 1)
        if len(self._events) == 2 * MOST_EVENTS:
            self._drop()

    def _drop(self) -> None:
        """Forget the first events."""
        del self._events[:MOST_EVENTS]
        self._num_dropped += MOST_EVENTS
        self._starts = deque((start for start in self._starts if start >= self._num_dropped), maxlen=NUM_STEPS)
        self._starts = self._starts or deque([self._num_dropped], maxlen=NUM_STEPS)
        if self._next is not None and self._next < self._num_dropped:
            self._next = None

    def _after_same_beginning(self) -> int | None:
        """Return the place after the events of the latest step that begins with the events of this one."""
        *earlier, current = (start - self._num_dropped for start in self._starts)
        length = len(self._events) - current
        for start in reversed(earlier):
            if start + length <= current and self._events[start : start + length] == self._events[current:]:
                return start + length + self._num_dropped
        return None

    def _after_longest_match(self, event: int) -> int | None:
        longest, found = 0, None
        for place in self._places[event]:
            length = self._match(place - self._num_dropped)
            if length >= max(longest, 1):
                longest, found = length, place + 1
        return found

    def _match(self, other: int) -> int:
        """Return how many events up to index ``other`` equal the last ones, at most MOST_COMPARED."""
        events, own, length = self._events, len(self._events) - 1, 0
        while length < MOST_COMPARED and other - length >= 0 and events[own - length] == events[other - length]:
            length += 1
        return length


class CollectiveLog:
    """The log of a mesh, shared by all engines on it. An event is :data:`STEP`, :data:`UPDATE` or the number of an
    unsharded unit.

    Attributes:
        count: the number of events.
        successors: the events that ranks have performed together, by the axes along which the ranks differ.
    """

    def __init__(self) -> None:
        self._descriptions = ["is at engine.step()", "has changed parameters"]
        self._recent: deque[int] = deque(maxlen=NUM_SHOWN)
        self._lock = threading.Lock()
        self.count = 0
        self.successors = defaultdict[tuple[str, ...], Successors](Successors)
        self.num_micro_batches = 0  # completed
        self.operation = ""  # the last collective
        self.board: Board | None = None
        self.has_named_late = False  # a warning has named late ranks

    def register(self, names: Sequence[str]) -> int:
        """Number the units of an engine and return the first number. Every rank must make the same calls."""
        first = len(self._descriptions)
        self._descriptions += [f"gathers '{name}'" for name in names]
        return first

    def add(self, event: int) -> None:
        """Record that this rank performs ``event`` next."""
        with self._lock:
            self._recent.append(event)
            self.count += 1

    @property
    def doing(self) -> str:
        """Describe what this rank did last."""
        return f"{self.last} (last: {self.operation})" if self.operation else self.last

    @property
    def last(self) -> str:
        """The last event, described in the present tense."""
        return self.describe(self._recent[-1]) if self._recent else "has gathered nothing"

    def describe(self, event: int) -> str:
        """Describe ``event`` in the present tense."""
        return self._descriptions[event]

    def publish(self) -> None:
        """Let other ranks read this log. Called from any thread; no effect without a board."""
        if self.board is not None:
            with self._lock:
                note = json.dumps([self.count, list(self._recent)])
            self.board.post(note)

    def difference(self) -> list[int | None] | None:
        """Publish this log and compare it with the published logs of the other ranks.

        Returns: every rank's event (None: not known yet) at the first position where two logs differ; None if they
        agree.
        """
        assert self.board is not None, "there is no other rank"
        self.publish()
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
