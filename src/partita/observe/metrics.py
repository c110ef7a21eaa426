"""Rows of metrics: written to ``metrics.jsonl`` as they come, and to TensorBoard where it is installed.

A row is complete in itself (each has its step and token count), so a file that was cut off is readable to its end.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partita.errors import PartitaError

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class TrainRow:
    """Training since the row before: means over its steps, but ``lr`` and ``grad_norm`` of its last step.

    ``tokens`` counts from the start, over all ranks; ``loss`` is in nats per token; ``memory_bytes`` is per rank.
    """

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    step_s: float
    memory_bytes: tuple[int, ...]


@dataclass(frozen=True)
class HeldOutRow:
    """Mean loss on held-out text, in nats per token, after ``step`` steps."""

    step: int
    tokens: int
    held_out_loss: float


class MetricsWriter:
    """Writes rows into a folder, replacing those that an earlier run left there of steps ``after`` the one that this
    run goes on from.
    """

    def __init__(self, folder: Path, after: int = 0) -> None:
        self._folder = folder
        self._begin(after, is_evaluated=False)

    def go_back(self, step: int) -> None:
        """Take back the rows of the steps after ``step``, which training went back to."""
        self.close()
        self._begin(step, is_evaluated=True)

    def _begin(self, after: int, *, is_evaluated: bool) -> None:
        folder = self._folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept = _rows_until(folder / METRICS_FILE, after, is_evaluated) if after else ""
            written = folder / f".{METRICS_FILE}.new"
            with written.open("w") as file:  # aside: a run that ends here leaves the rows as they were
                file.write(kept)
                file.flush()
                os.fsync(file.fileno())
            written.rename(folder / METRICS_FILE)
            self._file = (folder / METRICS_FILE).open("a")
        except OSError as error:
            raise PartitaError(
                f"cannot write metrics into '{folder}': {error.strerror}; set train.out to another folder"
            ) from None
        self._board = _open_tensorboard(folder, after)

    @property
    def has_tensorboard(self) -> bool:
        return self._board is not None

    def write(self, row: TrainRow | HeldOutRow) -> None:
        kind = "train" if isinstance(row, TrainRow) else "held_out"
        self._file.write(json.dumps({"kind": kind, **asdict(row)}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _scalars(row):
                self._board.add_scalar(name, value, row.step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> tuple[list[TrainRow], list[HeldOutRow]]:
    """The rows of a ``metrics.jsonl``; a last line that was cut off is left out."""
    train: list[TrainRow] = []
    held_out: list[HeldOutRow] = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if row.pop("kind") == "train":
            train.append(TrainRow(**row | {"memory_bytes": tuple(row["memory_bytes"])}))
        else:
            held_out.append(HeldOutRow(**row))
    return train, held_out


def _scalars(row: TrainRow | HeldOutRow) -> Iterator[tuple[str, float]]:
    if isinstance(row, HeldOutRow):
        yield "loss/held_out", row.held_out_loss
        return
    yield "loss/train", row.loss
    yield "learning_rate", row.lr
    yield "tokens_per_s", row.tokens_per_s
    yield "memory_bytes/largest_rank", max(row.memory_bytes)
    if row.grad_norm is not None:
        yield "gradient_norm", row.grad_norm


def _rows_until(path: Path, last_step: int, is_evaluated: bool) -> str:
    """The lines until a step, whose own held-out loss is kept if it ``is_evaluated``, and not to be measured again."""
    if not path.exists():
        return ""
    train, held_out = read_metrics(path)
    lines = path.read_text().splitlines(keepends=True)[: len(train) + len(held_out)]
    rows = ((line, json.loads(line)) for line in lines)
    return "".join(line for line, row in rows if row["step"] < last_step + (is_evaluated or row["kind"] == "train"))


def _open_tensorboard(folder: Path, after: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    events = folder / "tensorboard"
    if after:
        return SummaryWriter(str(events), purge_step=after + 1)
    for earlier in events.glob("events.out.tfevents.*"):  # or both runs would be drawn as one
        earlier.unlink()
    return SummaryWriter(str(events))
