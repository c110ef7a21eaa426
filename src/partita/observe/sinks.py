"""Sinks that show a run's figures outside its own folder: TensorBoard, Weights & Biases, MLflow.

Each library is imported when it is selected. It takes its own settings from the usual places (``wandb login``,
``MLFLOW_TRACKING_URI``, ...).
"""

import importlib.util
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.config.schema import SinkName
from partita.errors import ConfigError, PartitaError


@dataclass(frozen=True)
class Run:
    """The run that a sink is opened for: its folder, the step it resumes from (None: a new run), and its settings."""

    folder: Path
    after: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


class MetricsSink(ABC):
    """A destination of a run's figures, by name. One process writes. Steps increase, except after :meth:`rewind`."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures after ``step`` optimizer steps."""

    @abstractmethod
    def rewind(self, step: int) -> None:
        """Undo the steps after ``step``. Their figures will be written again."""

    @abstractmethod
    def close(self) -> None:
        """Finish after all figures are written."""


_EVENT_FILES = "events.out.tfevents.*"
# The parts of a name: before the second in which the file was made, this second, and the rest.
_EVENT_NAME = re.compile(r"(events\.out\.tfevents\.)([0-9]+)(.*)")
_LONGEST_WAIT_S = 2.0


class TensorBoard(MetricsSink):
    """Event files in the folder ``tensorboard`` of the run."""

    def __init__(self, run: Run) -> None:
        self._events = run.folder / "tensorboard"
        if run.after is None:
            for earlier in self._events.glob(_EVENT_FILES):  # otherwise both runs would be drawn as one
                earlier.unlink()
        self._open(None if run.after is None else run.after + 1)

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Readers order files by name. It has the second, and then a number whose text has no fixed length.
        if self._first_second() > time.time() + _LONGEST_WAIT_S:
            self._renumber()  # the clock of the process that wrote them was ahead of this one
        first = self._first_second()
        while time.time() < first:
            time.sleep(0.05)
        self._board: Any = SummaryWriter(str(self._events), purge_step=purge_step)

    def _first_second(self) -> int:
        """Return the first second in which the name of a new event file comes after those of the others."""
        return max((int(name[2]) + 1 for _, name in self._named()), default=0)

    def _renumber(self) -> None:
        """Replace the second in the names of event files by their place, so that a new file comes after them."""
        for place, (path, name) in enumerate(sorted(self._named(), key=lambda each: each[0].name)):
            path.rename(path.with_name(f"{name[1]}{place:010}{name[3]}"))

    def _named(self) -> list[tuple[Path, re.Match[str]]]:
        """Return the event files, with the parts of their names."""
        files = ((path, _EVENT_NAME.fullmatch(path.name)) for path in self._events.glob(_EVENT_FILES))
        return [(path, name) for path, name in files if name]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()  # a process that exits without closing the engine keeps its last rows

    def rewind(self, step: int) -> None:
        self._board.close()
        self._open(step + 1)

    def close(self) -> None:
        self._board.close()


class WandB(MetricsSink):
    """A run of Weights & Biases, whose files are in the folder ``wandb`` of the run.

    Its own step counter never goes back, so figures are drawn over a separate metric, ``step``.
    """

    def __init__(self, run: Run) -> None:
        import wandb

        identity = _Identity(run.folder / "wandb_run")
        kept = None if run.after is None else identity.read()
        self._run: Any = wandb.init(
            dir=str(run.folder),
            name=run.folder.name,
            id=kept,
            resume="allow" if kept else None,
            config=dict(run.settings),
            settings=wandb.Settings(console="off"),  # the console is drawn on by the progress bar
        )
        identity.write(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def rewind(self, step: int) -> None:
        """Do nothing. Both values of a step stay, because what was sent cannot be undone."""

    def close(self) -> None:
        self._run.finish()


class MLflow(MetricsSink):
    """A run of MLflow in the experiment that MLflow's own settings name."""

    def __init__(self, run: Run) -> None:
        import mlflow

        identity = _Identity(run.folder / "mlflow_run")
        kept = None if run.after is None else identity.read()
        self._mlflow: Any = mlflow
        self._run_id = mlflow.start_run(run_id=kept, run_name=None if kept else run.folder.name).info.run_id
        identity.write(self._run_id)
        if kept is None:
            mlflow.log_params(dict(_flat(run.settings)))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._run_id)

    def rewind(self, step: int) -> None:
        """Do nothing. Both values of a step stay, because MLflow keeps every value that was logged."""

    def close(self) -> None:
        self._mlflow.end_run()


@dataclass(frozen=True)
class _Known:
    package: str
    open: Callable[[Run], MetricsSink]
    needs: str  # what opening needs in addition to the package


SINKS: dict[SinkName, _Known] = {
    "tensorboard": _Known("tensorboard", TensorBoard, "a folder that can be written"),
    "wandb": _Known("wandb", WandB, "a login (wandb login) and the network, or WANDB_MODE=offline"),
    "mlflow": _Known("mlflow", MLflow, "a server or folder that MLFLOW_TRACKING_URI names"),
}


def installed(name: SinkName) -> bool:
    """Return True if the library of this sink is installed."""
    return importlib.util.find_spec(SINKS[name].package) is not None


def check_installed(names: Sequence[SinkName], key: str) -> None:
    """Check that the libraries of these sinks are installed, before anything is started.

    Raises:
        ConfigError: one is missing; the message names the setting ``key`` and the package.
    """
    for name in names:
        if not installed(name):
            package = SINKS[name].package
            raise ConfigError(f"{key}: {name} is not installed: pip install {package}, or remove it from the list")


def open_sink(name: SinkName, run: Run) -> MetricsSink:
    """Open the sink of this name.

    Raises:
        PartitaError: the library fails; the message has its reason, and what it needs.
    """
    known = SINKS[name]
    try:
        return known.open(run)
    except Exception as error:  # three libraries, each with errors of its own
        raise PartitaError(f"metrics cannot be written to {name}: {error}; it needs {known.needs}") from error


@dataclass(frozen=True)
class _Identity:
    """The identifier that a service gave the run, in a file in the run's folder. A resumed run continues under it."""

    file: Path

    def read(self) -> str | None:
        return self.file.read_text().strip() if self.file.exists() else None

    def write(self, identity: str) -> None:
        self.file.write_text(f"{identity}\n")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
