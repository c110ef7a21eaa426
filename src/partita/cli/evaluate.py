"""``partita eval``: the loss of a run's weights on held-out data."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from partita.cli.console import user_errors
from partita.cli.processes import num_to_start
from partita.cli.train import Processes
from partita.cli.worker import EVALUATE
from partita.config.launchers import launch_environment
from partita.train.trained import evaluate, load_trained

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job, such as data.corpus=other.jsonl."),
]


def eval_command(
    run: Annotated[Path, typer.Argument(metavar="JOB|DIR", help="A run: its job file, or the folder of its results.")],
    overrides: Overrides = None,
    processes: Processes = None,
) -> None:
    """Show the held-out loss and the perplexity of the weights that partita train has written.

    The held-out data are those of the run, which it has not trained on. train.eval_batches says how many.
    """
    environment = launch_environment()
    with user_errors():
        job = load_trained(run, overrides or ())
        num_processes = num_to_start(environment, processes)
    if num_processes > 1:
        from partita.cli.launch import launch  # torch's agent takes a second to import

        with user_errors():
            arguments = [EVALUATE, str(run), *(overrides or ())]
            raise typer.Exit(launch(num_processes, "partita.cli.worker", arguments, Console(stderr=True)))
    with user_errors(f"rank {environment.rank}: " if environment.world_size > 1 else ""):
        found = evaluate(job, Console(stderr=True, quiet=environment.rank > 0))
    if environment.rank == 0:
        typer.echo(found)
