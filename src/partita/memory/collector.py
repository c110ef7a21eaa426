"""Python's garbage collector, held back while very many objects are made that stay.

It looks for cycles each time that enough new objects are there, and so at those that stay again and again: more than
half of the time that the records of many small parameters take.
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
    """Hold the collector back, in all threads, until the last of the blocks that are open is left."""
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


def _begin_anew() -> None:
    """In a forked child, which has none of the other threads' blocks."""
    global _num_paused
    if _num_paused and _was_enabled:
        gc.enable()
    _num_paused = 0
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_anew)
