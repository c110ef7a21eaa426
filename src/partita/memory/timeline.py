"""What a step does, told as it happens to whoever watches: a profile, or the simulator.

Spans are named by what is done (``gather``, ``reduce``, ``update``, ``copy``, ``disk``, ``pipeline``) or waited for
(``wait for ...``). While nobody watches, telling costs next to nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from partita.plan.traffic import TrafficKey


class Watcher(ABC):
    """Called from any thread."""

    @abstractmethod
    def span(self, what: str, name: str) -> AbstractContextManager[None]:
        """Around work, or a wait, of this kind on what is called ``name`` (a unit, a parameter)."""

    @abstractmethod
    def sent(self, key: TrafficKey, num_bytes: int) -> None:
        """This rank sends so many bytes."""


_watcher: Watcher | None = None
_NOTHING = nullcontext()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher`` what all engines of this process do, for a while."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


def span(what: str, name: str = "") -> AbstractContextManager[None]:
    """See :meth:`Watcher.span`."""
    return _NOTHING if _watcher is None else _watcher.span(what, name)


def sent(key: TrafficKey, num_bytes: int) -> None:
    """See :meth:`Watcher.sent`."""
    if _watcher is not None:
        _watcher.sent(key, num_bytes)
