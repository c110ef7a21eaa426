"""Progress, in a terminal and elsewhere."""

import io
from dataclasses import replace
from itertools import count

import pytest
from rich.console import Console

from partita.observe.metrics import HeldOutRow, TrainRow
from partita.observe.progress import TrainingProgress, figures

ROW = TrainRow(5, 320, 2.34567, 1e-3, 0.5, 12_345.6, 0.026, (10_000_000, 412_000_000))


def shown(terminal: bool, quiet: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=120, quiet=quiet, legacy_windows=False, color_system=None
    )
    with TrainingProgress(console, 10) as progress:
        for step in range(1, 11):
            progress.step(step)
            progress.row(ROW)
            if step % 5 == 0:
                progress.held_out(HeldOutRow(step, 0, 1.5))
        progress.print_line("[not] {markup}")
    return out.getvalue()


def test_without_a_terminal_there_is_a_line_for_each_row_and_evaluation() -> None:
    lines = shown(terminal=False).splitlines()
    assert len(lines) == 10 + 2 + 1
    assert lines[0].startswith("step  5/10  loss 2.3457  12,346 tokens/s  grad norm 0.50  412 MB per rank  ETA 0:0")
    assert lines[5].startswith("step  5/10  held-out loss 1.5000")
    assert lines[-1] == "[not] {markup}"


def test_the_time_left_is_by_the_steps_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr("time.monotonic", lambda: 10.0 * next(clock))
    out = io.StringIO()
    progress = TrainingProgress(Console(file=out, width=200), 100)
    progress.resume_at(90)
    progress.row(replace(ROW, step=92))  # 10 s for two steps
    assert out.getvalue().rstrip().endswith("ETA 0:40")


def test_in_a_terminal_there_is_a_bar_and_lines_above_it() -> None:
    text = shown(terminal=True)
    assert "10/10" in text
    assert "12,346 tokens/s" in text
    assert "step  5/10  held-out loss 1.5000" in text


def test_a_quiet_rank_shows_nothing() -> None:
    assert shown(terminal=True, quiet=True) == ""


def test_a_row_without_a_norm_shows_none() -> None:
    row = TrainRow(1, 64, 2.0, 1e-3, None, 10.0, 1.0, (5,))
    assert figures(row) == "loss 2.0000  10 tokens/s  5 B per rank"


def test_a_row_with_a_utilization_shows_it() -> None:
    row = TrainRow(1, 64, 2.0, 1e-3, None, 10.0, 1.0, (5,), mfu=0.4123)
    assert figures(row) == "loss 2.0000  10 tokens/s  MFU 41.2%  5 B per rank"
