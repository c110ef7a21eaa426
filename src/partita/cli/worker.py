"""One of the processes of ``partita train --processes N``: ``python -m partita.cli.worker JOB [KEY=VALUE ...]``."""

import sys
from collections.abc import Sequence

from rich.console import Console

from partita.cli.process import end_with_parent, outcome_of
from partita.train.job import load_job
from partita.train.loop import train


def main(arguments: Sequence[str]) -> int:
    """Runs the job on this rank; returns the exit code, 0 after a first Ctrl-C too (the launcher makes it 130)."""
    return outcome_of(lambda: train(load_job(arguments[0], arguments[1:]), Console()))


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
