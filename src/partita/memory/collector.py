"""Python's garbage collector, held back while very many objects are made that stay, or spared those that are there.

It looks for cycles each time that enough new objects are there, and so at those that stay again and again: more than
half of the time that the records of many small parameters take. While training, a rank whose turn it is to look at all
that imports have made stops for a tenth of a second and more, and with it every rank that waits for it.
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


@contextmanager
def collector_spared() -> Iterator[None]:
    """In the block, the collector does not look at what was there when it was entered; it ran just before."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _begin_anew() -> None:
    """In a forked child, which has none of the other threads' blocks."""
    global _num_paused
    if _num_paused and _was_enabled:
        gc.enable()
    _num_paused = 0
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_anew)
