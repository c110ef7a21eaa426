"""The trainer on several ranks: an error that only rank 0 has ends all ranks."""

from pathlib import Path
from typing import Any

from rich.console import Console

from partita.errors import PartitaError
from partita.train.job import load_job
from partita.train.loop import train
from tests.kit.ranks import on_ranks


def trained_into(settings: dict[str, Any]) -> str:
    try:
        train(load_job(settings), Console(quiet=True))
    except PartitaError as error:
        return str(error)
    return "trained"


def test_metrics_that_cannot_be_written_end_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"to be or not to be, that is the question. " * 100)
    (tmp_path / "file").write_text("")
    settings = {
        "model": {"layers": 1, "width": 16, "heads": 2},
        "data": {"corpus": str(tmp_path / "text.txt"), "sequence": 8, "held_out": 0.2},
        "train": {"steps": 1, "out": str(tmp_path / "file" / "out"), "metrics": []},
        "engine": {"batch": {"total": 2}},
    }
    first, second = on_ranks(2, trained_into, settings, with_group=False)
    assert first.startswith("cannot write metrics into")
    assert second == "rank 0 cannot write the metrics: see its error"
