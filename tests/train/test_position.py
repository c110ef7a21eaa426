"""The position of a run in its data."""

from pathlib import Path
from typing import Any

from partita.train.position import Completed, DataPosition, Place, completed


def test_another_batch_continues_after_the_last_sample() -> None:
    extra: dict[str, Any] = {}
    assert [DataPosition(extra, 4).advance(step) for step in (1, 2)] == [Place(1, 0), Place(2, 4)]
    assert [DataPosition(extra, 6).advance(step) for step in (3, 4)] == [Place(3, 8), Place(4, 14)]


def test_a_rewind_skips_the_data_of_undone_steps() -> None:
    extra: dict[str, Any] = {}
    position = DataPosition(extra, 4)
    saved, last = {}, Place(0, 0)
    for step in range(1, 6):
        last = position.advance(step)
        saved = dict(extra) if step == 2 else saved
    extra.clear()
    extra.update(saved)  # as a rewound engine does
    position.rewind(last, 2)
    assert [position.advance(step) for step in (3, 4)] == [Place(6, 20), Place(7, 24)]
    assert DataPosition(extra, 6).advance(5) == Place(8, 28)


def test_a_checkpoint_without_a_number_of_samples_has_those_of_its_steps() -> None:
    assert DataPosition({}, 4).advance(3) == Place(3, 8)
    assert DataPosition({"batches_left_out": 2}, 4).advance(3) == Place(5, 16)


def test_without_a_checkpoint_nothing_is_completed(tmp_path: Path) -> None:
    assert completed(None, 4) == completed(str(tmp_path), 4) == Completed(0, 0)
