"""Lock files, which tell whether the process that writes into a hidden folder still runs.

The kernel lets go of a lock (flock) when its process ends, however it ends, and over NFS as well.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from partita.checkpoint.format.system import explained


class Lock:
    """A new file that is locked until :meth:`release`, or until the process ends.

    Where the filesystem has no locks, it counts as locked for as long as it is there.
    """

    def __init__(self, path: Path) -> None:
        with explained(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Let go of it, also for processes that were forked meanwhile; the file stays."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock, or nothing is known of that. False if there is no such file."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(file)
