"""Sockets that forked children (a DataLoader's workers) let go of.

A child has all that its parent had open, and the other side of a socket learns of an end only when nobody has it any
more: with a child alive, a rank that was killed would look like one that is slow.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_SOCKET_FAMILIES = (socket.AF_INET, socket.AF_INET6)
# By number and inode: a number that was closed may come to mean another file.
_own: set[tuple[int, int]] = set()


def keep_from_children(descriptor: int) -> None:
    """Children that are forked from now on do not have this socket."""
    _own.add((descriptor, os.fstat(descriptor).st_ino))


@contextlib.contextmanager
def connections_kept_from_children() -> Iterator[None]:
    """The same for each network connection that a library opens inside the block, and does not name. (One that another
    thread happens to open meanwhile is taken for such a one.)
    """
    before = _sockets()
    _own.intersection_update(before)  # without those that were closed
    try:
        yield
    finally:
        _own.update(opened for opened in _sockets() - before if _is_of_network(opened[0]))


def _sockets() -> set[tuple[int, int]]:
    """Those that are open, by number and inode; none are seen where the system has no /proc."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed since
                status = os.fstat(int(entry.name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(entry.name), status.st_ino))
    return found


def _is_of_network(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            return copy.family in _SOCKET_FAMILIES
    except OSError:  # closed since
        return False


def _let_go() -> None:
    """In a child. The numbers stay taken, so that whatever closes them there does not close another file."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor, inode in _own:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _own.clear()


os.register_at_fork(after_in_child=_let_go)
