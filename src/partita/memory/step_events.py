"""Events of a step, reported to a profile or the simulator.

Spans are named after the work (``gather``, ``reduce``, ``update``, ``copy``, ``disk``, ``pipeline``) or the wait for it
(:data:`WAIT` and the work). Without a watcher, reporting costs almost nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from partita.table.traffic import TrafficKey

WAIT = "wait for "


class Watcher(ABC):
    """Receives the events of a step, from any thread."""

    @abstractmethod
    def span(self, what: str, name: str) -> AbstractContextManager[None]:
        """Return a context for work or a wait of kind ``what`` on ``name`` (a unit, a parameter)."""

    @abstractmethod
    def sent(self, key: TrafficKey, num_bytes: int) -> None:
        """Record that this rank sends ``num_bytes``."""


_watchers: tuple[Watcher, ...] = ()  # replaced, never mutated: other threads may be iterating over it
_NOTHING = nullcontext()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Report the events of all engines of this process to ``watcher`` inside a block."""
    global _watchers
    _watchers = (*_watchers, watcher)
    try:
        yield
    finally:
        _watchers = tuple(each for each in _watchers if each is not watcher)


def span(what: str, name: str = "") -> AbstractContextManager[None]:
    """Open a span in every watcher, as in :meth:`Watcher.span`."""
    return _all_spans(_watchers, what, name) if _watchers else _NOTHING


@contextmanager
def _all_spans(watchers: tuple[Watcher, ...], what: str, name: str) -> Iterator[None]:
    with ExitStack() as spans:
        for watcher in watchers:
            spans.enter_context(watcher.span(what, name))
        yield


def in_span(work: Callable[[], object], what: str, name: str) -> Callable[[], object]:
    """Return ``work`` inside a span, if there is a watcher."""
    if not _watchers:
        return work

    def watched() -> object:
        with span(what, name):
            return work()

    return watched


def sent(key: TrafficKey, num_bytes: int) -> None:
    """Report sent bytes to every watcher, as in :meth:`Watcher.sent`."""
    for watcher in _watchers:
        watcher.sent(key, num_bytes)
