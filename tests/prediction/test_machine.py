"""Machine files, and curves through measured points."""

from dataclasses import replace
from pathlib import Path

import pytest

from partita.errors import ConfigError
from partita.prediction.curve import Curve
from partita.prediction.machine import machine_named, machines, read_machine, write_machine

CURVE = Curve(((10.0, 1.0), (1000.0, 10.0)))


def test_a_curve_goes_through_its_points() -> None:
    assert [CURVE.seconds(size) for size in (10, 1000)] == pytest.approx([1.0, 10.0])
    assert CURVE.seconds(100) == pytest.approx(10**0.5)  # halfway between the logarithms
    assert CURVE.seconds(1) == 1.0  # as long as the smallest measured job
    assert CURVE.seconds(3000) == pytest.approx(30.0)  # at the rate of the largest measured job
    assert CURVE.best_rate == 100.0


def test_a_measured_machine_is_read_as_it_was_written(tmp_path: Path) -> None:
    machine = replace(machines()["h100"], name="mine", curves=(("product", CURVE),), source="measured", one_memory=True)
    write_machine(machine, tmp_path / "mine.yaml")
    found = read_machine(tmp_path / "mine.yaml")
    assert (found, found.source) == (machine, "measured")
    assert machine_named(str(tmp_path / "mine.yaml"), disk=5.0) == replace(machine, disk=5.0)


@pytest.mark.parametrize("text", ["- a", "a: 1", "mine: {gpus: 1}", "{a: {}, b: {}}", "{", "mine: {curves: 3}"])
def test_what_is_no_machine_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is no file of one machine"):
        read_machine(tmp_path / "mine.yaml")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        machine_named(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_machine(machines()["h100"], tmp_path / "none" / "mine.yaml")
