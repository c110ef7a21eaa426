"""Rows of metrics, written to files and read back."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from partita.errors import PartitaError
from partita.observe.metrics import METRICS_FILE, HeldOutRow, MetricsWriter, TrainRow, read_metrics
from partita.observe.sinks import Run

TRAIN = [TrainRow(step, step * 64, 5.0 / step, 1e-3, 0.5, 1000.0, 0.064, (10_000, 12_000)) for step in (1, 2, 3)]
HELD_OUT = [HeldOutRow(0, 0, 5.5), HeldOutRow(3, 192, 2.5)]


def write_all(folder: Path) -> None:
    with closing(MetricsWriter(Run(folder))) as writer:
        for row in [HELD_OUT[0], *TRAIN, HELD_OUT[1]]:
            writer.write(row)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    write_all(tmp_path / "new" / "folder")
    assert read_metrics(tmp_path / "new" / "folder" / METRICS_FILE) == (TRAIN, HELD_OUT)


def test_a_row_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with closing(MetricsWriter(Run(tmp_path))) as writer:
        writer.write(TRAIN[0])
        assert read_metrics(tmp_path / METRICS_FILE) == ([TRAIN[0]], [])


def test_a_file_that_was_cut_off_is_read_to_its_last_whole_row(tmp_path: Path) -> None:
    write_all(tmp_path)
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text()[:-20])
    assert read_metrics(path) == (TRAIN, HELD_OUT[:1])


def test_another_run_replaces_the_rows(tmp_path: Path) -> None:
    write_all(tmp_path)
    write_all(tmp_path)
    assert read_metrics(tmp_path / METRICS_FILE) == (TRAIN, HELD_OUT)


def test_a_run_that_goes_on_and_dies_early_leaves_the_rows_that_it_kept(tmp_path: Path) -> None:
    write_all(tmp_path)
    with closing(MetricsWriter(Run(tmp_path, after=3))):
        assert read_metrics(tmp_path / METRICS_FILE) == (TRAIN, HELD_OUT[:1])  # the last step is evaluated again


@pytest.mark.parametrize("after", [None, 0, 2])
def test_a_run_that_cannot_start_leaves_all_rows(
    after: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    write_all(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PartitaError, match="cannot write metrics into .*No space left"):
        MetricsWriter(Run(tmp_path, after))
    assert read_metrics(tmp_path / METRICS_FILE) == (TRAIN, HELD_OUT)


def test_rows_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    write_all(tmp_path)
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text().replace(', "mfu": null', ""))
    assert read_metrics(path) == (TRAIN, HELD_OUT)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        PartitaError, match=r"cannot write metrics into '.*file/inner': Not a directory; set train\.out"
    ):
        MetricsWriter(Run(tmp_path / "file" / "inner"))
