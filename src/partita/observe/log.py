"""Metrics that a training loop logs from its own code."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from partita.config.schema import Config
from partita.errors import ConfigError, PartitaError
from partita.memory import accelerator
from partita.observe.metrics import METRICS_FILE, LoggedRow, MetricsWriter
from partita.observe.sinks import Run, check_installed


class MetricsLog:
    """Rows that :meth:`Engine.log` writes, on rank 0 only.

    The files are opened by the first row: after a resumed run has loaded its checkpoint.

    Args:
        config: the configuration, whose section ``metrics`` names the folder and the sinks.
        is_main: True on rank 0.

    Raises:
        ConfigError: the library of a sink is not installed.
    """

    def __init__(self, config: Config, is_main: bool) -> None:
        check_installed(config.metrics.sinks, "metrics.sinks")
        self._config = config
        # Made absolute once: the process may change its working directory.
        self._dir = Path(config.metrics.dir).absolute() if config.metrics.dir is not None else None
        self._is_main = is_main
        self._writer: MetricsWriter | None = None
        self._resumed_at: int | None = None  # step of a checkpoint that was loaded after the last row
        self._starts_again = False

    def write(self, values: Mapping[str, Tensor | float], step: int) -> None:
        """Write a row after ``step`` complete batches. See :meth:`Engine.log`."""
        if self._dir is None:
            raise ConfigError("engine.log: there is no folder to write metrics into: set metrics.dir")
        for name, value in values.items():
            is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
            if not is_number:
                got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
                raise PartitaError(
                    f"engine.log: expected a number or a tensor with one element by name; {name!r} is {got}"
                )
        if not self._is_main:
            return
        if self._writer is None:
            self._writer = self._open(self._dir)
        elif self._resumed_at is not None:
            self._writer.rewind(self._resumed_at)
        self._resumed_at = None
        self._writer.write(LoggedRow(step, {name: _number(value) for name, value in values.items()}))

    def resume_at(self, step: int) -> None:
        """Continue after the checkpoint of ``step``: the next row removes the rows of later steps."""
        self._resumed_at = step

    def start_again(self) -> None:
        """Start a run again that has no checkpoint: its first row removes the rows of the process before."""
        self._starts_again = True

    def _open(self, folder: Path) -> MetricsWriter:
        """Open the files, and keep the rows until the step that the run resumes from.

        Raises:
            PartitaError: a new run would replace the rows of another one, or the files cannot be written.
        """
        path = folder / METRICS_FILE
        is_new = self._resumed_at is None and not self._starts_again
        if is_new and path.exists() and path.stat().st_size:
            raise PartitaError(
                f"engine.log: '{path}' holds the rows of an earlier run: call engine.resume() before the first "
                "engine.log to continue it, or set metrics.dir to another folder"
            )
        settings = self._config.model_dump(mode="json")
        return MetricsWriter(Run(folder, self._resumed_at, settings), self._config.metrics.sinks, "metrics.dir")

    def close(self) -> None:
        """Finish all files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _number(value: Tensor | float) -> float:
    return float(accelerator.read(value.detach()) if isinstance(value, Tensor) else value)
