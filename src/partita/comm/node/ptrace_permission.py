"""Permission for other processes of the same user to read this one's memory.

Where the Yama security module guards it, a process names one other, which is admitted with all that descend from it,
for as long as it is named: every single reading is checked.
"""

import ctypes
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
# Under other scopes than this nobody asks who is named: all are admitted, or none.
_RESTRICTED = "1"
_INIT = 1
# How many want each process to be admitted.
_admitted: Counter[int] = Counter()


def admit(processes: Iterable[int]) -> None:
    """Let these read, until they are withdrawn as often."""
    _count(processes, 1)


def withdraw(processes: Iterable[int]) -> None:
    """Take one admission of each back."""
    _count(processes, -1)


def _count(processes: Iterable[int], change: int) -> None:
    before = set(_admitted)
    for process in processes:
        _admitted[process] += change
        if not _admitted[process]:
            del _admitted[process]
    if _admitted.keys() != before and _scope() == _RESTRICTED:
        _set_tracer(common_ancestor(list(_admitted)))


def _set_tracer(process: int) -> None:
    """Name it to the kernel; 0: nobody."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(process), 0, 0, 0)


def _scope() -> str:
    with suppress(OSError):
        return _SCOPE.read_text().strip()
    return ""


def common_ancestor(processes: list[int]) -> int:
    """The nearest that all are or descend from; 0 if there is none. Init, of which every process descends, is one only
    where it has started this process itself, as the launcher of a container.
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
            # The parent follows the state, and that the command, which is in parentheses and may hold any character.
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended, or is hidden
            break
    return line
