"""Console output of a run on rank 0: progress and the library's messages. Other ranks are silent."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from partita.config.messages import format_bytes
from partita.observe.metrics import HeldOutRow, TrainRow

REFRESH_S = 0.2


class TrainingProgress:
    """A display of training progress: a bar in a terminal, one line per evaluation elsewhere.

    A context manager: the bar stops when the block ends for any reason.

    Args:
        console: where to write; a quiet one on all ranks except the first.
        num_steps: optimizer steps of the full run.
    """

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._live = console.is_terminal and not console.quiet
        self._first_step = 0
        self._started_s = self._refreshed_s = time.monotonic()
        # Refreshed from the training loop: a drawing thread would compete with it for the interpreter.
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            auto_refresh=False,
            disable=not self._live,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=num_steps, figures="")

    def resume_at(self, step: int) -> None:
        """Start from the ``step`` optimizer steps that an earlier run has done."""
        self._first_step = step
        self._started_s = time.monotonic()

    def step(self, step: int) -> None:
        """Show that ``step`` optimizer steps are done."""
        self._bar.update(self._task, completed=step)
        now_s = time.monotonic()
        if now_s - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = now_s
            self._bar.refresh()

    def row(self, row: TrainRow) -> None:
        """Show a row of metrics: in the bar, or, without a terminal, in a line."""
        self._bar.update(self._task, figures=figures(row))
        if not self._live:
            self._print_step(row.step, f"{figures(row)}  ETA {_duration(self._remaining_s(row.step))}")

    def held_out(self, row: HeldOutRow) -> None:
        """Show an evaluation in a line, above the bar if there is one."""
        self._print_step(row.step, f"held-out loss {row.held_out_loss:.4f}")

    def _print_step(self, step: int, text: str) -> None:
        self.print_line(f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}  {text}")

    def print_line(self, line: str) -> None:
        """Print one line verbatim (no markup, no highlighting), above the bar if there is one."""
        self._console.print(Text(line), soft_wrap=True)

    def _remaining_s(self, step: int) -> float:
        elapsed_s, num_done = time.monotonic() - self._started_s, step - self._first_step
        return elapsed_s / num_done * (self._num_steps - step) if num_done > 0 else 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def figures(row: TrainRow) -> str:
    """Return the figures of a row as a short text."""
    norm = "" if row.grad_norm is None else f"  grad norm {row.grad_norm:.2f}"
    mfu = "" if row.mfu is None else f"  MFU {row.mfu:.1%}"
    memory = format_bytes(max(row.memory_bytes))
    return f"loss {row.loss:.4f}  {row.tokens_per_s:,.0f} tokens/s{mfu}{norm}  {memory} per rank"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


class _Handler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(Text(record.getMessage()), soft_wrap=True)


@contextmanager
def notices_on(console: Console) -> Iterator[None]:
    """Print the messages of the logger ``partita`` on a console, unless the application has configured logging."""
    logger = logging.getLogger("partita")
    if logger.hasHandlers() or logger.level:
        yield
        return
    handler = _Handler(console)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
