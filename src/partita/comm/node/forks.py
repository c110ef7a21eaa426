"""Sockets that forked children (a DataLoader's workers) close.

A child inherits all open sockets of its parent, and the peer of a socket is notified only when the last process closes
it. As long as a child is alive, a rank that was killed would look like a slow rank.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_SOCKET_FAMILIES = (socket.AF_INET, socket.AF_INET6)
# By descriptor and inode: the descriptor of a closed file may be reused.
_own: set[tuple[int, int]] = set()


def keep_from_children(descriptor: int) -> None:
    """Close this socket in children that are forked from now on."""
    _own.add((descriptor, os.fstat(descriptor).st_ino))


@contextlib.contextmanager
def connections_kept_from_children() -> Iterator[None]:
    """Close in forked children every network connection that a library opens inside the block. Connections that other
    threads open meanwhile are included.
    """
    before = _sockets()
    _own.intersection_update(before)  # drop sockets that were closed
    try:
        yield
    finally:
        _own.update(opened for opened in _sockets() - before if _is_of_network(opened[0]))


def _sockets() -> set[tuple[int, int]]:
    """Return the open sockets, by descriptor and inode; an empty set if the system has no /proc."""
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
    """Close the sockets in a child. Their descriptors stay in use (/dev/null), so that a later close of them in the
    child does not close another file.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor, inode in _own:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _own.clear()


os.register_at_fork(after_in_child=_let_go)
