"""Rows of metrics, written immediately to ``metrics.jsonl`` and to the sinks that show them.

A row is complete in itself (each has its step and token count), so a truncated file is readable up to its end.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from partita.config.schema import SinkName
from partita.errors import PartitaError
from partita.observe.sinks import MetricsSink, Run, open_sink

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class TrainRow:
    """Metrics of training since the previous row.

    All are means over its steps, except ``lr`` and ``grad_norm``, which are those of its last step. ``tokens`` counts
    from the start, over all ranks; ``loss`` is in nats per token; ``memory_bytes`` is per rank; ``mfu`` is the model
    FLOPs utilization as a fraction (None: unknown for this device).
    """

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    step_s: float
    memory_bytes: tuple[int, ...]
    mfu: float | None = None

    @property
    def figures(self) -> dict[str, float]:
        """The values of the row, by the names that sinks show."""
        known = {
            "loss/train": self.loss,
            "learning_rate": self.lr,
            "tokens_per_s": self.tokens_per_s,
            "memory_bytes/largest_rank": float(max(self.memory_bytes)),
            "gradient_norm": self.grad_norm,
            "model_flops_utilization": self.mfu,
        }
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class HeldOutRow:
    """Mean loss on held-out text, in nats per token, after ``step`` steps."""

    step: int
    tokens: int
    held_out_loss: float

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite where a float has no such number."""
        try:
            return math.exp(self.held_out_loss)
        except OverflowError:
            return math.inf

    @property
    def figures(self) -> dict[str, float]:
        """The values of the row, by the names that sinks show."""
        return {"loss/held_out": self.held_out_loss, "perplexity/held_out": self.perplexity}


@dataclass(frozen=True)
class LoggedRow:
    """Values that a training loop logged (:meth:`Engine.log`), after ``step`` complete batches."""

    step: int
    values: Mapping[str, float]

    @property
    def figures(self) -> Mapping[str, float]:
        """The values of the row, by the names that sinks show."""
        return self.values


Row = TrainRow | HeldOutRow | LoggedRow
_KINDS: dict[str, type[Row]] = {"train": TrainRow, "held_out": HeldOutRow, "logged": LoggedRow}


class MetricsWriter:
    """A writer of rows to a run's folder and to sinks.

    Rows of an earlier run after the step that this run resumes from are replaced. A sink that fails later is removed
    with a warning.

    Args:
        run: the folder, and the step that the run resumes from.
        sinks: names of sinks that also show the rows (``partita.observe.sinks``).
        setting: the config key of the folder, for errors.

    Raises:
        PartitaError: the folder cannot be written, or a sink cannot be opened.
    """

    def __init__(self, run: Run, sinks: Sequence[SinkName] = (), setting: str = "train.out") -> None:
        self._folder = run.folder
        self._setting = setting
        self._sinks: dict[SinkName, MetricsSink] = {}
        self._begin(run.after, is_evaluated=False)
        try:
            for name in sinks:
                self._sinks[name] = open_sink(name, run)
        except PartitaError:
            self.close()
            raise

    def rewind(self, step: int) -> None:
        """Remove the rows after ``step``, the step that training has rewound to."""
        self._close_file()
        self._begin(step, is_evaluated=True)
        self._notify(lambda sink: sink.rewind(step))

    def _begin(self, after: int | None, *, is_evaluated: bool) -> None:
        folder = self._folder
        with self._errors_explained():
            folder.mkdir(parents=True, exist_ok=True)
            kept = "" if after is None else _rows_until(folder / METRICS_FILE, after, is_evaluated)
            written = folder / f".{METRICS_FILE}.new"
            with written.open("w") as file:  # a temporary file, so that a run that ends here leaves the rows unchanged
                file.write(kept)
                file.flush()
                os.fsync(file.fileno())
            written.rename(folder / METRICS_FILE)
            self._file = (folder / METRICS_FILE).open("a")

    def write(self, row: Row) -> None:
        """Write a row, and show it in the sinks.

        Raises:
            PartitaError: the folder cannot be written.
        """
        kind = next(name for name, of_kind in _KINDS.items() if isinstance(row, of_kind))
        with self._errors_explained():
            self._file.write(json.dumps({"kind": kind, **asdict(row)}) + "\n")
            self._file.flush()
        self._notify(lambda sink: sink.write(row.step, row.figures))

    def close(self) -> None:
        """Close the file and the sinks.

        Raises:
            PartitaError: rows that could not be written before still cannot.
        """
        try:
            self._close_file()
        finally:
            self._notify(lambda sink: sink.close())

    def _close_file(self) -> None:
        with self._errors_explained():
            self._file.close()

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Convert system errors in the block to errors that name the folder and its setting."""
        try:
            yield
        except OSError as error:
            raise PartitaError(
                f"cannot write metrics into '{self._folder}': {error.strerror or error}; set {self._setting} to "
                "another folder"
            ) from None

    def _notify(self, call: Callable[[MetricsSink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # a service that is down must not end training
                del self._sinks[name]
                warnings.warn(
                    f"metrics are no longer written to {name}: {error}; all of them are in "
                    f"'{self._folder / METRICS_FILE}'",
                    stacklevel=3,
                )


def read_metrics(path: Path) -> tuple[list[TrainRow], list[HeldOutRow]]:
    """Return the trainer's rows of a ``metrics.jsonl``. A truncated last line is left out."""
    rows = [row for _, row in _read(path)]
    return [row for row in rows if isinstance(row, TrainRow)], [row for row in rows if isinstance(row, HeldOutRow)]


def _read(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield each line of a ``metrics.jsonl`` with its row, up to a truncated line."""
    for line in path.read_text().splitlines(keepends=True):
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            return
        kind = _KINDS[values.pop("kind")]
        if kind is TrainRow:
            values["memory_bytes"] = tuple(values["memory_bytes"])
        yield line, kind(**values)


def _rows_until(path: Path, last_step: int, is_evaluated: bool) -> str:
    """Return the lines up to a step.

    The held-out loss of that step is kept if it ``is_evaluated``, because it will not be measured again.
    """
    if not path.exists():
        return ""
    stop = last_step + 1
    return "".join(
        line for line, row in _read(path) if row.step < (stop - (isinstance(row, HeldOutRow) and not is_evaluated))
    )
