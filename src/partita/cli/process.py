"""What every process does that :mod:`partita.cli.launch` starts: it ends with the launcher, and fails in silence.

It writes an error down for the launcher, which tells it once for all ranks.
"""

import ctypes
import signal
import sys
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from partita.cli.console import FAILURE, INTERRUPTED, USER_ERROR
from partita.errors import PartitaError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def outcome_of(work: Callable[[], object]) -> int:
    """Does the work; returns the exit code, and writes down what went wrong."""
    try:
        work()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        get_error_handler().record_exception(error)
        return USER_ERROR if isinstance(error, PartitaError) else FAILURE
    return 0


def end_with_parent() -> None:
    """Has the kernel end this process when the launcher is gone, however that came about (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
