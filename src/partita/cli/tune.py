"""``partita tune``: finds the fastest config in short measured trials."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from partita.cli.console import INTERRUPTED, Overwrite, check_new, show_notice, user_errors
from partita.cli.plan import Tokens
from partita.config.messages import format_bytes
from partita.config.write import YAML
from partita.errors import ConfigError
from partita.prediction.tune.target import Target
from partita.prediction.tune.tune import NUM_TRIALS, THIS, Effort, Trial, Tuned
from partita.prediction.tune.tune import tune as run_trials
from partita.table.residence import Tier

RESULTS = "tune.jsonl"
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model as in partita plan, or a job file of partita train.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the job, or of the config. May be repeated."),
]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Processes per trial on this machine.", show_default="one per GPU, or one")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Fixed settings of every trial of a model: a config, YAML or JSON.")
]
Gpu = Annotated[
    str | None,
    typer.Option(help="The machine of predictions, as in partita plan.", show_default="this machine, measured"),
]
MostTrials = Annotated[int, typer.Option("--trials", min=1, help="Maximum number of trials.")]
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the best config, or the job with it (.yaml), or the results of trials (.jsonl). Trials whose "
        "results the file already has are not measured again.",
        show_default=RESULTS,
    ),
]


def tune(
    model: Model,
    processes: Processes = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    gpu: Gpu = None,
    tokens: Tokens = None,
    trials: MostTrials = NUM_TRIALS,
    files: Files = None,
    overwrite: Overwrite = False,
) -> None:
    """Find the fastest config on this machine, by short trials of plans and of variants of the best ones.

    Trials that run out of memory, fail or hang are rows of the table, too. An interrupted tuning resumes from its
    results. The number of samples per step (batch.total) does not change.
    """
    progress = Console(stderr=True)

    def on_trial(trial: Trial) -> None:
        found = trial.outcome
        ended = found.failed or f"{found.step_s:.3g} s, {format_bytes(found.peak_bytes or 0)}"
        progress.print(f"{_name(trial)}: {ended}", highlight=False, markup=False, soft_wrap=True)

    with user_errors():
        results, written = _sorted(files or [])
        check_new(written, overwrite)
        target = Target(model, tokens, tuple(overrides or ()))
        given: dict[str, Any] = {"machine": gpu or THIS, "config": config, "results": results}
        try:
            found = run_trials(target, processes=processes, effort=Effort(trials), on_trial=on_trial, **given)
        except KeyboardInterrupt:
            show_notice(progress, f"interrupted; the same command continues from {results}")
            raise typer.Exit(INTERRUPTED) from None
        for file in written:
            found.write(file)
    show(found, Console())


def _sorted(files: Sequence[Path]) -> tuple[Path, list[Path]]:
    """Return the file of results, and the files for the config."""
    results = [file for file in files if file.suffix == ".jsonl"]
    written = [file for file in files if file.suffix in YAML]
    for file in files:
        if file not in (*results, *written):
            raise ConfigError(f"--out {file}: expected a name that ends in .yaml (the config) or .jsonl (the results)")
    if len(results) > 1:
        raise ConfigError(f"--out: expected at most one file of results (.jsonl); got {', '.join(map(str, results))}")
    return (results[0] if results else Path(RESULTS)), written


def show(found: Tuned, console: Console) -> None:
    """Print a row for each trial, fastest first, and the best config."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("states", "micro", "recomputed", "other"):
        table.add_column(name)
    for name in ("predicted", "measured", "peak predicted", "peak measured"):
        table.add_column(name, justify="right")
    for trial in sorted(found.trials, key=lambda trial: trial.seconds):
        table.add_row(*_row(trial))
    console.print(table)
    for trial in found.trials:
        if trial.outcome.failed:
            console.print(f"{_name(trial)}: {trial.outcome.failed}", highlight=False, markup=False, soft_wrap=True)
    end = "no variant of the best is faster" if found.complete else "more --trials may find a faster one"
    console.print(
        f"\n{len(found.trials)} trial{'s' * (len(found.trials) > 1)}; {end}\n\n[bold]config[/]", highlight=False
    )
    console.print(yaml.safe_dump(found.config(), sort_keys=False).rstrip(), highlight=False, markup=False)


def _row(trial: Trial) -> tuple[str, ...]:
    settings, found = trial.candidate.settings, trial.outcome
    return (
        _states(trial),
        f"{settings.micro} x {settings.accumulate}",
        "" if settings.checkpoint == "none" else settings.checkpoint,
        _other(trial),
        f"{trial.candidate.seconds:.3g} s",
        f"{found.step_s:.3g} s" if found.step_s is not None else "no memory" if found.lacks_memory else "failed",
        format_bytes(_predicted_bytes(trial)),
        "" if found.peak_bytes is None else format_bytes(found.peak_bytes),
    )


def _predicted_bytes(trial: Trial) -> int:
    forecast = trial.candidate.forecast
    used = forecast.by_tier
    return used[Tier.DEVICE] + (used[Tier.HOST] if forecast.budget.one_memory else 0)


def _states(trial: Trial) -> str:
    mesh = trial.candidate.settings.mesh
    axes = [f"{axis} {mesh.size(axis)}" for axis in ("tensor", "pipeline") if mesh.size(axis) > 1]
    return ", ".join([trial.candidate.settings.states.name, *axes])


def _other(trial: Trial) -> str:
    return ", ".join(f"{key} {value}" for key, value in trial.candidate.variant.zero().items())


def _name(trial: Trial) -> str:
    settings, other = trial.candidate.settings, _other(trial)
    words = [_states(trial), f"micro {settings.micro} x {settings.accumulate}"]
    words += [f"checkpoint {settings.checkpoint}"] * (settings.checkpoint != "none") + [other] * bool(other)
    return ", ".join(words)
