"""The loss plot."""

from pathlib import Path

import pytest

from partita.observe.metrics import HeldOutRow, TrainRow
from partita.observe.plots import plot_losses, smoothed


def rows(num: int) -> list[TrainRow]:
    return [TrainRow(step, step * 64, 1 + 4 / step, 1e-3, None, 1.0, 1.0, (1,)) for step in range(1, num + 1)]


@pytest.mark.parametrize(("num_train", "num_held_out"), [(50, 2), (1, 1), (0, 1), (3, 0)])
def test_it_draws_what_there_is(tmp_path: Path, num_train: int, num_held_out: int) -> None:
    path = tmp_path / "loss.png"
    plot_losses(path, rows(num_train), [HeldOutRow(step, 0, 5.0 - step) for step in range(num_held_out)], "a title")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_tokens_have_no_axis_in_bits(tmp_path: Path) -> None:
    texts = {}
    for token in ("byte", "token"):
        path = tmp_path / f"{token}.svg"
        plot_losses(path, rows(9), [], "a title", token)
        texts[token] = path.read_text()
    for words in ("loss (nats per byte)", "bits per byte", "optimizer step (64 bytes each)", "a title"):
        assert words in texts["byte"]
    assert "loss (nats per token)" in texts["token"]
    assert "bits" not in texts["token"]


def test_smoothing_keeps_a_constant_and_averages_noise() -> None:
    assert smoothed([2.0] * 100) == pytest.approx([2.0] * 100)
    line = [float(n) for n in range(100)]
    assert smoothed(line) == pytest.approx(line)  # no lag
    wave = [1.0 + (-1) ** n for n in range(400)]
    assert all(0.9 < value < 1.1 for value in smoothed(wave)[50:-50])
    assert smoothed([3.0, 1.0]) == [3.0, 1.0]
    assert smoothed([]) == []
