"""Python's garbage collector: paused while very many lasting objects are made, or kept from visiting existing ones.

It looks for cycles each time that enough new objects exist, and so visits those that stay again and again: more than
half of the time that the records of many small parameters take. While training, a rank whose collector visits
everything that imports have made stops for a tenth of a second or more, and with it every rank that waits for it.
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
def collector_spared() -> Iterator[None]:
    """Run the collector once, then keep it from visiting the existing objects inside the block."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _begin_anew() -> None:
    """Reset the state in a forked child, in which the other threads' blocks do not exist."""
    global _num_paused
    if _num_paused and _was_enabled:
        gc.enable()
    _num_paused = 0
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_anew)
