"""Permission for other processes of the same user to read this one's memory (ptrace).

With the Yama security module a process names one other process, and that process and its descendants may read. The
kernel checks every single read, so the permission ends when another process is named.
"""

import ctypes
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
# Only in this scope does the named process matter; in other scopes all processes may read, or none.
_RESTRICTED = "1"
_INIT = 1
# Number of times that each process was given permission.
_granted: Counter[int] = Counter()


def grant(processes: Iterable[int]) -> None:
    """Permit these processes to read. Permissions are counted; :func:`revoke` removes one."""
    _count(processes, 1)


def revoke(processes: Iterable[int]) -> None:
    """Remove one permission of each process."""
    _count(processes, -1)


def _count(processes: Iterable[int], change: int) -> None:
    before = set(_granted)
    for process in processes:
        _granted[process] += change
        if not _granted[process]:
            del _granted[process]
    if _granted.keys() != before and _scope() == _RESTRICTED:
        _set_tracer(common_ancestor(list(_granted)))


def _set_tracer(process: int) -> None:
    """Name the process that may read to the kernel; 0: none."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(process), 0, 0, 0)


def _scope() -> str:
    with suppress(OSError):
        return _SCOPE.read_text().strip()
    return ""


def common_ancestor(processes: list[int]) -> int:
    """Return the nearest common ancestor of the processes (or one of them); 0 if there is none. Init, the ancestor of
    every process, counts only if it is the parent of this process, as the launcher of a container is.
    """
    lines = [_with_ancestors(process) for process in processes]
    shared = (one for one in (lines[0] if lines else ()) if all(one in line for line in lines))
    found = next(shared, 0)
    return found if found != _INIT or os.getppid() == _INIT else 0


def _with_ancestors(process: int) -> list[int]:
    line = []
    while process > 0:
        line.append(process)
        try:
            # Fields: pid (command) state parent. The command may contain any character, including parentheses.
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended, or is hidden
            break
    return line
