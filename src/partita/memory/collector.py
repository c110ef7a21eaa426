"""Python's garbage collector: pause it while many long-lived objects are created, or freeze existing objects.

The collector looks for cycles whenever enough new objects exist, and so traverses long-lived objects again and again.
This takes more than half of the time of creating the records of many small parameters. During training, a collection
that traverses all imported modules stops a rank for a tenth of a second or more, and every rank that waits for it.
"""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_paused, _was_enabled = 0, False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector, in all threads, until the last open block ends."""
    global _num_paused, _was_enabled
    with _lock:
        if not _num_paused:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_paused += 1
    try:
        yield
    finally:
        with _lock:
            _num_paused = max(0, _num_paused - 1)
            if not _num_paused and _was_enabled:
                gc.enable()


@contextmanager
def collector_frozen() -> Iterator[None]:
    """Run the collector once, then exclude the existing objects from collections inside the block."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _reset_in_child() -> None:
    """Reset the state in a forked child, in which the other threads' blocks do not exist."""
    global _num_paused
    if _num_paused and _was_enabled:
        gc.enable()
    _num_paused = 0
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_reset_in_child)
