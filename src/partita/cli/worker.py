"""Process of ``partita train --processes N``: ``python -m partita.cli.worker [--explain] JOB [KEY=VALUE ...]``.

With ``--explain``, the processes only show how the model is split.
"""

import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from partita.cli.console import replace_unprintable, show_warnings_in_one_line, system_errors
from partita.cli.process import end_with_parent, outcome_of
from partita.train.job import load_job
from partita.train.loop import explain, train

EXPLAIN = "--explain"


def main(arguments: Sequence[str]) -> int:
    """Run the job on this rank; return the exit code, which is also 0 after Ctrl-C (the launcher returns 130)."""
    run = explain if arguments[0] == EXPLAIN else train
    job, *overrides = arguments[1:] if run is explain else arguments
    replace_unprintable()
    show_warnings_in_one_line()

    def work() -> None:
        with system_errors():
            run(load_job(job, overrides), Console())

    return outcome_of(work)


if __name__ == "__main__":
    end_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the launcher may forward it before training handles it
    sys.exit(main(sys.argv[1:]))
