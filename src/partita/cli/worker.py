"""One process of ``partita train --processes N``: ``python -m partita.cli.worker JOB [KEY=VALUE ...]``.

With ``--explain`` before JOB, the processes show how the model is split.
"""

import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from partita.cli.process import end_with_parent, outcome_of
from partita.train.job import load_job
from partita.train.loop import explain, train

EXPLAIN = "--explain"


def main(arguments: Sequence[str]) -> int:
    """Run the job on this rank; return the exit code, 0 after a first Ctrl-C too (the launcher makes it 130)."""
    run = explain if arguments[0] == EXPLAIN else train
    job, *overrides = arguments[1:] if run is explain else arguments
    return outcome_of(lambda: run(load_job(job, overrides), Console()))


if __name__ == "__main__":
    end_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the launcher passes it on, and training may not have begun
    sys.exit(main(sys.argv[1:]))
