"""Events of a step, reported as they happen to a profile or the simulator.

Spans are named by what is done (``gather``, ``reduce``, ``update``, ``copy``, ``disk``, ``pipeline``) or waited for
(:data:`WAIT` and that). While nobody watches, telling costs next to nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from partita.plan.traffic import TrafficKey

WAIT = "wait for "


class Watcher(ABC):
    """Called from any thread."""

    @abstractmethod
    def span(self, what: str, name: str) -> AbstractContextManager[None]:
        """Around work, or a wait, of this kind on what is called ``name`` (a unit, a parameter)."""

    @abstractmethod
    def sent(self, key: TrafficKey, num_bytes: int) -> None:
        """This rank sends so many bytes."""


_watchers: tuple[Watcher, ...] = ()  # one may come, and go, while others watch
_NOTHING = nullcontext()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher`` what all engines of this process do, for a while."""
    global _watchers
    _watchers = (*_watchers, watcher)
    try:
        yield
    finally:
        _watchers = tuple(each for each in _watchers if each is not watcher)


def span(what: str, name: str = "") -> AbstractContextManager[None]:
    """See :meth:`Watcher.span`."""
    return _all_told(_watchers, what, name) if _watchers else _NOTHING


@contextmanager
def _all_told(watchers: tuple[Watcher, ...], what: str, name: str) -> Iterator[None]:
    with ExitStack() as spans:
        for watcher in watchers:
            spans.enter_context(watcher.span(what, name))
        yield


def told(work: Callable[[], object], what: str, name: str) -> Callable[[], object]:
    """``work`` inside a span, if anybody watches."""
    if not _watchers:
        return work

    def watched() -> object:
        with span(what, name):
            return work()

    return watched


def sent(key: TrafficKey, num_bytes: int) -> None:
    """See :meth:`Watcher.sent`."""
    for watcher in _watchers:
        watcher.sent(key, num_bytes)
