"""``partita train``: runs a job here, or on several processes that it starts."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from partita.cli.console import INTERRUPTED, user_errors
from partita.cli.processes import num_to_start
from partita.cli.worker import EXPLAIN
from partita.config.launchers import launch_environment
from partita.config.resolve import resolve
from partita.errors import ConfigError
from partita.memory import accelerator
from partita.train.job import Job, load_job
from partita.train.loop import explain as explain_job
from partita.train.loop import train as run_job

# Steps that --profile watches, unless the job says how many.
WATCHED = 3

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job, a YAML or JSON file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the job, such as train.steps=10. May be repeated."),
]
Processes = Annotated[
    int | None,
    typer.Option(min=1, help="Processes to start on this machine.", show_default="one per GPU, or one without GPUs"),
]


Explain = Annotated[
    bool,
    typer.Option("--explain", help="Show how each module is split over the processes, and by which rule; then end."),
]
Profile = Annotated[
    bool,
    typer.Option("--profile", help=f"Write the timeline of {WATCHED} steps, and show what they waited for."),
]


def train(
    job: JobFile,
    overrides: Overrides = None,
    processes: Processes = None,
    explain: Explain = False,
    profile: Profile = False,
) -> None:
    """Train a model: metrics, a loss plot, a sample and the weights (safetensors) are in the job's folder.

    Under torchrun or srun, this process is one of theirs. Ctrl-C finishes the step in progress, writes the weights and
    the plot, and exits with 130; a second Ctrl-C ends at once.
    """
    overrides = [*([f"train.profile={WATCHED}"] if profile else ()), *(overrides or ())]
    with user_errors():
        loaded = load_job(job, overrides)
        environment = launch_environment()
        num_processes = num_to_start(environment, processes)
        if environment.world_size == 1:
            check(loaded, num_processes)
    if num_processes > 1:
        from partita.cli.launch import launch  # torch's agent takes a second to import

        arguments = [*([EXPLAIN] if explain else ()), str(job), *overrides]
        raise typer.Exit(launch(num_processes, "partita.cli.worker", arguments, Console(stderr=True)))
    with user_errors(f"rank {environment.rank}: " if environment.world_size > 1 else ""):
        if explain:
            explain_job(loaded, Console())
            return
        outcome = run_job(loaded, Console())
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def check(job: Job, num_processes: int) -> None:
    """Finds what is wrong before any process is started.

    Raises:
        ConfigError: the engine's configuration does not fit the number of processes, or ``train.out`` cannot be made.
    """
    resolve(job.engine, num_processes, accelerator.device_type())
    try:
        job.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"train.out: cannot make the folder '{job.out}': {error.strerror}; name another one"
        ) from None
