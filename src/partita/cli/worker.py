"""One of the processes of ``partita train --processes N``: ``python -m partita.cli.worker JOB [KEY=VALUE ...]``.

It says nothing when it fails: it writes the error down for the launcher, which tells it once for all ranks.
"""

import ctypes
import signal
import sys
from collections.abc import Sequence

from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from partita.cli.console import FAILURE, INTERRUPTED, USER_ERROR
from partita.errors import PartitaError
from partita.train.job import load_job
from partita.train.loop import train

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: Sequence[str]) -> int:
    """Runs the job on this rank; returns the exit code, 0 after a first Ctrl-C too (the launcher makes it 130)."""
    try:
        train(load_job(arguments[0], arguments[1:]), Console())
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


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
