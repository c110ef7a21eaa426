"""Measurement of the current machine: every kind of job has points, and plans use them."""

import json
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

import partita
from partita import ConfigError, PartitaError
from partita.cli.main import app
from partita.memory import accelerator
from partita.prediction.machine import Machine
from partita.prediction.measure_machine import _machine, _measure, measure_machine
from partita.prediction.processes import RankResult
from partita.prediction.rank_measurement import Points, RankSettings, measure_rank
from tests.prediction.test_images import Scale, jobs_of, sizes

SMALL = "layers=2,hidden=64,heads=2,vocab=96,context=32"
IMAGES = {"convolution", "convolution_backward", "batch_norm", "batch_norm_backward", "pool"}
COMPUTED = {"product", "attention", "attention_backward", "element", "function", "update", *IMAGES}

CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


def failed(error: str, *, lacks_memory: bool = False) -> dict[str, object]:
    return {"error": error, "lacks_memory": lacks_memory}


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Points]:
    for name, value in {"ROUND_S": 1e-4, "LONGEST_S": 1e-5, "MIN_CYCLE_BYTES": 2**16, "DISK_BYTES": 2**20}.items():
        monkeypatch.setattr(f"partita.prediction.rank_measurement.{name}", value)
    return measure_rank(RankSettings(0, 1, 1, "cpu", "float32", "", str(tmp_path)))


def test_every_kind_of_job_is_measured(points: dict[str, Points]) -> None:
    assert points.keys() == {*COMPUTED, "disk"}
    for kind, of_kind in points.items():
        assert all(size > 0 and seconds > 0 for size, seconds in of_kind), kind
        assert [size for size, _ in of_kind] == sorted({size for size, _ in of_kind}), kind
    assert points["product"][0][0] == 2 * 16**3
    assert points["disk"][0][0] == 2**20


def test_jobs_on_images_have_the_sizes_that_a_trace_counts(points: dict[str, Points]) -> None:
    """Measured sizes on images of 4 x 4 pixels are those of a trace, except the scale and statistics of batch norms."""
    jobs = jobs_of(Scale(), nn.Conv2d(4, 4, 3, padding=1), shape=(4, 4, 4))
    jobs += jobs_of(Scale(), nn.BatchNorm2d(64), nn.MaxPool2d(3, 2, 1), shape=(64, 4, 4))
    for kind in IMAGES:
        (size,), few = sizes(jobs, kind), 7 * 64 * 4  # scale, 2 running and 2 saved statistics, 2 gradients
        assert points[kind][0][0] <= size <= points[kind][0][0] + few * ("norm" in kind), kind


def test_a_plan_is_made_of_what_was_measured(points: dict[str, Points]) -> None:
    machine = _machine("mine", accelerator.HOST, 1, points)
    slow = {kind: [(size, 10 * seconds) for size, seconds in of_kind] for kind, of_kind in points.items()}
    times = []
    for each in (machine, _machine("mine", accelerator.HOST, 1, slow)):
        best = partita.plan(SMALL, gpu=each, samples=8).best
        assert best is not None
        assert best.time is not None
        times.append(best.time.total_s)
    assert times[1] == pytest.approx(10 * times[0])


def test_ranks_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus: expected 1 to .* ranks.*; got 0"):
        measure_machine(0)


def settings(folder: Path, *dtypes: str) -> list[RankSettings]:
    url = f"file://{folder}/store"
    return [RankSettings(rank, len(dtypes), 1, "cpu", dtype, url, str(folder)) for rank, dtype in enumerate(dtypes)]


def test_the_error_of_a_rank_is_one_line(tmp_path: Path) -> None:
    """It is that of the rank that failed, and not the error of a rank that waits for it."""
    with pytest.raises(PartitaError) as caught:
        _measure(settings(tmp_path, "float32", "float99"), tmp_path)
    error = "AttributeError: module 'torch' has no attribute 'float99'"
    assert str(caught.value) == f"measuring this machine: rank 1: {error}"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (RankResult(1, None, "Traceback:\nit broke"), RankResult(-9, None, ""), "rank 1 was ended by SIGKILL; Linux"),
        (RankResult(1, failed("no"), ""), RankResult(1, failed("more", lacks_memory=True), ""), "rank 1: more"),
        (RankResult(1, failed(CLOSED), ""), RankResult(1, failed("no"), ""), "rank 1: no"),
        (RankResult(1, failed("no"), ""), RankResult(1, failed(CLOSED), ""), "rank 0: no"),
        (RankResult(None, None, ""), RankResult(3, None, "Traceback:\nit broke"), "rank 1 ended with exit code 3: it"),
        (RankResult(1, None, ""), RankResult(None, None, ""), "rank 0 ended with exit code 1: without output"),
    ],
)
def test_the_failure_that_caused_the_others_is_named(
    first: RankResult, second: RankResult, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.prediction.measure_machine.run_ranks", lambda *_: [first, second])
    with pytest.raises(PartitaError, match=f"^measuring this machine: {message}") as caught:
        _measure(settings(tmp_path, "float32", "float32"), tmp_path)
    assert "Traceback" not in str(caught.value)


def test_the_commands(monkeypatch: pytest.MonkeyPatch, points: dict[str, Points], tmp_path: Path) -> None:
    def made(ranks: int, name: str = "this machine") -> Machine:
        assert ranks == 1
        return _machine(name, accelerator.HOST, ranks, points)

    monkeypatch.setattr("partita.cli.plan.measure_machine", made)
    monkeypatch.setattr("partita.cli.machine.measure_machine", made)
    file, figures = str(tmp_path / "mine.yaml"), tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["machine", "--out", file])
    assert result.exit_code == 0, result.output
    assert "attention backward" in result.output
    found = []
    for words in (["--gpu", file], ["--this-machine", "--disk", "7GB"]):
        result = CliRunner().invoke(app, ["plan", SMALL, *words, "--json", str(figures), "--overwrite"])
        assert result.exit_code == 0, result.output
        found.append(json.loads(figures.read_text())["machine"])
    assert [machine["name"] for machine in found] == ["mine", "this machine"]
    assert found[1]["disk"] == 7e9


@pytest.mark.thorough
def test_two_ranks_measure_what_they_send() -> None:
    machine = measure_machine(2)
    assert {kind for kind, _ in machine.curves} == {*COMPUTED, "gather", "reduce"}
    assert machine.gpus == 2
    assert machine.node_link > 1e6
