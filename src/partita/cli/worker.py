"""Process of ``partita train --processes N``: ``python -m partita.cli.worker [OPTION] JOB [KEY=VALUE ...]``.

With ``--explain``, the processes only show how the model is split; with ``--evaluate``, they evaluate a run's weights.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from partita.cli.console import replace_unprintable, show_warnings_in_one_line, system_errors
from partita.cli.process import end_with_parent, outcome_of
from partita.config.launchers import launch_environment
from partita.train.job import Job, load_job
from partita.train.loop import explain, train
from partita.train.trained import evaluate, load_trained

EXPLAIN, EVALUATE = "--explain", "--evaluate"


def main(arguments: Sequence[str]) -> int:
    """Run the job on this rank; return the exit code, which is also 0 after Ctrl-C (the launcher returns 130)."""
    runs: dict[str, Callable[[Job, Console], object]] = {EXPLAIN: explain, EVALUATE: _evaluate}
    job, *overrides = arguments[1:] if arguments[0] in runs else arguments
    load = load_trained if arguments[0] == EVALUATE else load_job
    replace_unprintable()
    show_warnings_in_one_line()

    def work() -> None:
        with system_errors():
            runs.get(arguments[0], train)(load(Path(job), overrides), Console())

    return outcome_of(work)


def _evaluate(job: Job, console: Console) -> None:
    rank = launch_environment().rank
    found = evaluate(job, Console(stderr=True, quiet=rank > 0))
    if rank == 0:
        console.print(str(found), soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    end_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the launcher may forward it before training handles it
    sys.exit(main(sys.argv[1:]))
