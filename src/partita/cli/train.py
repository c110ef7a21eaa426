"""``partita train``: runs a job in this process, or starts several processes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from partita.checkpoint.format.folder import complete_checkpoints
from partita.cli.console import INTERRUPTED, Overwrite, show_notice, user_errors
from partita.cli.processes import num_to_start
from partita.cli.worker import EXPLAIN
from partita.config.launchers import launch_environment
from partita.config.resolve import resolve
from partita.errors import ConfigError
from partita.memory import accelerator
from partita.prediction.given_config import Estimate, estimate_config
from partita.prediction.machine import Machine, machine_named
from partita.prediction.tune.target import Target
from partita.train.job import Job, default_out, load_job
from partita.train.loop import explain as explain_job
from partita.train.loop import train as run_job
from partita.train.results import check_out, numbered_out, out_override
from partita.train.watched_steps import trace_of

# Default number of steps that --profile records.
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
    typer.Option("--explain", help="Show how each module is split over the processes, and by which rule, and exit."),
]
Profile = Annotated[
    bool,
    typer.Option("--profile", help=f"Write the timeline of {WATCHED} steps, and show their waiting times."),
]


MachineName = Annotated[
    str | None,
    typer.Option(
        help="With --profile: add the step that is predicted for this machine (h100, ..., or a file of partita "
        "machine) to the measured timeline."
    ),
]


def train(
    job: JobFile,
    overrides: Overrides = None,
    processes: Processes = None,
    explain: Explain = False,
    profile: Profile = False,
    machine: MachineName = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a model; write metrics, a loss plot, a sample and the weights (safetensors) to the job's folder.

    Under torchrun or srun, this process is one of the ranks. Ctrl-C finishes the current step, writes the weights and
    the plot, and exits with 130; a second Ctrl-C exits at once.
    """
    asked = {f"train.profile={WATCHED}": profile, "train.overwrite=true": overwrite}
    overrides = [*(key for key, given in asked.items() if given), *(overrides or ())]
    with user_errors():
        loaded = load_job(job, overrides)
        environment = launch_environment()
        num_processes = num_to_start(environment, processes)
        if environment.world_size == 1:
            if not explain and (out := _numbered(loaded, job)) != loaded.out:
                show_notice(Console(stderr=True), f"'{loaded.out}' holds an earlier run; this one writes into '{out}'")
                overrides = [*overrides, out_override(out)]
                loaded = load_job(job, overrides)
            check(loaded, num_processes)
            if not explain:
                check_out(loaded, resumes=_has_checkpoint(loaded))
        num_ranks = max(num_processes, environment.world_size)
        # Before the run, so that an error is shown at once. Under a launcher only the first rank needs it.
        prediction = None
        if machine is not None and environment.rank == 0:
            prediction = Prediction.of(Target(str(job), None, tuple(overrides)), machine, num_ranks)
    if num_processes > 1:
        from partita.cli.launch import launch  # torch's agent takes a second to import

        arguments = [*([EXPLAIN] if explain else ()), str(job), *overrides]
        with user_errors():
            code = launch(num_processes, "partita.cli.worker", arguments, Console(stderr=True))
            if prediction is not None and not code and not explain:
                prediction.add_to_traces(loaded.out, num_ranks)
        raise typer.Exit(code)
    with user_errors(f"rank {environment.rank}: " if environment.world_size > 1 else ""):
        if explain:
            explain_job(loaded, Console())
            return
        outcome = run_job(loaded, Console())
        if prediction is not None:
            prediction.add_to_traces(loaded.out, num_ranks)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def _numbered(job: Job, file: Path) -> Path:
    """Return the folder of a run's results: the default one is numbered if it holds an earlier run."""
    keeps = job.out != default_out(file) or job.train.overwrite or _has_checkpoint(job)
    return job.out if keeps else numbered_out(job)


def _has_checkpoint(job: Job) -> bool:
    """Return whether the run resumes from a checkpoint."""
    folder = job.engine.checkpoint.dir
    return folder is not None and bool(complete_checkpoints(Path(folder)))


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a job on a machine."""

    plan: Estimate
    machine: Machine

    @staticmethod
    def of(target: Target, machine: str, num_ranks: int) -> "Prediction":
        """Return the prediction of a job on this number of ranks.

        Raises:
            ConfigError: there is no such machine, the job has no profile, or the step cannot be predicted.
        """
        job = target.job()
        if job is None or not job.train.profile:
            raise ConfigError("--machine adds a predicted step to a measured timeline: add --profile")
        found, kind = machine_named(machine), accelerator.device_type()
        return Prediction(estimate_config(target.source(), job.engine, num_ranks, kind), found)

    def add_to_traces(self, out: Path, num_ranks: int) -> None:
        """Add the predicted step to the traces that ranks wrote to a run's folder. Other nodes may have other folders.

        Raises:
            ConfigError: a trace cannot be read, or written.
        """
        for rank in range(num_ranks):
            trace = trace_of(out, rank)
            if trace.exists():
                self.plan.add_to_trace(trace, self.machine)


def check(job: Job, num_processes: int) -> None:
    """Check the job before any process is started.

    Raises:
        ConfigError: the engine's configuration does not fit the number of processes, or ``train.out`` cannot be
            created.
    """
    resolve(job.engine, num_processes, accelerator.device_type())
    try:
        job.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"train.out: cannot make the folder '{job.out}': {error.strerror}; name another one"
        ) from None
