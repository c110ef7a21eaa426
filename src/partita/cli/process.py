"""Common code of the processes that :mod:`partita.cli.launch` starts. They end with the launcher, and record errors for
it instead of printing them; the launcher shows one error for all ranks.
"""

import ctypes
import signal
import sys
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from partita.cli.console import FAILURE, INTERRUPTED, USER_ERROR
from partita.errors import ConfigError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def outcome_of(work: Callable[[], object]) -> int:
    """Run the work; return the exit code, and record an error for the launcher."""
    try:
        work()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        get_error_handler().record_exception(error)
        return USER_ERROR if isinstance(error, ConfigError) else FAILURE
    return 0


def end_with_parent() -> None:
    """Make the kernel terminate this process when the launcher ends for any reason (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
