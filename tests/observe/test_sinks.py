"""Metrics sinks: files of each library are read back, resumed runs keep their rows, failures are reported."""

import importlib.util
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from partita.config.schema import SinkName
from partita.errors import ConfigError, PartitaError
from partita.observe import sinks
from partita.observe.metrics import METRICS_FILE, HeldOutRow, MetricsWriter, TrainRow, read_metrics
from partita.observe.sinks import MetricsSink, Run, check_installed, open_sink
from tests.observe.full_disk import fill_disk, needs_full_disk

TRAIN = [TrainRow(step, step * 64, 5.0 / step, 1e-3, 0.5, 1000.0, 0.064, (10_000, 12_000)) for step in (1, 2, 3)]
HELD_OUT = HeldOutRow(3, 192, 2.5)
LOSSES = [(row.step, pytest.approx(row.loss)) for row in TRAIN]


def write_all(run: Run, *names: SinkName) -> None:
    with closing(MetricsWriter(run, names)) as writer:
        for row in [*TRAIN[run.after :], HELD_OUT]:
            writer.write(row)


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(name)]


# ------------------------------------------------------------------------------------------------------ TensorBoard


def test_tensorboard_has_the_figures(tmp_path: Path) -> None:
    write_all(Run(tmp_path), "tensorboard")
    assert scalars(tmp_path, "loss/train") == LOSSES
    assert scalars(tmp_path, "loss/held_out") == [(3, 2.5)]
    assert [value for _, value in scalars(tmp_path, "memory_bytes/largest_rank")] == [12_000.0] * 3
    assert "model_flops_utilization" not in events(tmp_path).Tags()["scalars"]


def test_tensorboard_of_another_run_replaces_the_events(tmp_path: Path) -> None:
    write_all(Run(tmp_path), "tensorboard")
    write_all(Run(tmp_path), "tensorboard")
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize("number", [0, 9])
def test_tensorboard_of_a_run_that_goes_on_has_each_step_once(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run has each step once, although file 10 of a second sorts before its file 9.

    ``number`` is the number in the first file's name.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(number))
    write_all(Run(tmp_path), "tensorboard")
    write_all(Run(tmp_path, after=2), "tensorboard")
    assert scalars(tmp_path, "loss/train") == LOSSES


def test_tensorboard_takes_back_the_steps_that_are_undone(tmp_path: Path) -> None:
    with closing(MetricsWriter(Run(tmp_path), ["tensorboard"])) as writer:
        for row in TRAIN:
            writer.write(row)
        writer.rewind(1)
        writer.write(TRAIN[1])
    assert scalars(tmp_path, "loss/train") == LOSSES[:2]


def test_tensorboard_continues_after_files_of_a_clock_that_is_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run does not wait for the other clock, and has each step once. Other names are ignored."""

    def sleep(seconds: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(sinks, "time", SimpleNamespace(time=time.time, sleep=sleep))
    folder, ahead, rests = tmp_path / "tensorboard", int(time.time()) + 3600, list[str]()
    for after in range(2):
        write_all(Run(tmp_path, after=after), "tensorboard")
        newest = max(folder.glob("events.out.tfevents.[0-9]*"))
        *begin, _, rest = newest.name.split(".", 4)
        newest.rename(folder / ".".join([*begin, str(ahead + after), rest]))
        (folder / "events.out.tfevents.copy").touch()
        rests.append(rest)
    write_all(Run(tmp_path, after=2), "tensorboard")
    assert scalars(tmp_path, "loss/train") == LOSSES
    first, second, _, other = sorted(path.name for path in folder.iterdir())
    assert [first, second] == [f"events.out.tfevents.000000000{place}.{rest}" for place, rest in enumerate(rests)]
    assert other == "events.out.tfevents.copy"


# ----------------------------------------------------------------------------------------------------------- MLflow


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield MLflow's client of a store in a folder."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(before)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_mlflow_has_the_figures_and_the_settings_and_goes_on_in_the_same_run(tmp_path: Path, store: Any) -> None:
    folder = tmp_path / "tale"
    write_all(Run(folder, settings={"train": {"steps": 3}, "name": "x"}), "mlflow")
    write_all(Run(folder, after=2, settings={"train": {"steps": 4}}), "mlflow")
    (run,) = store.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("tale", "FINISHED")
    assert run.data.params == {"train.steps": "3", "name": "x"}
    history = [(metric.step, metric.value) for metric in store.get_metric_history(run.info.run_id, "loss/train")]
    assert sorted(history) == [*LOSSES, LOSSES[2]]
    assert [metric.value for metric in store.get_metric_history(run.info.run_id, "loss/held_out")] == [2.5, 2.5]


# ------------------------------------------------------------------------------------------------ Weights & Biases


class Logged:
    """A stand-in for a run of W&B that records its calls."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.rows, self.axes = arguments, list[dict[str, float]](), list[object]()
        self.id, self.finished = arguments["id"] or "new", False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[Logged]:
    runs = list[Logged]()

    class Module(ModuleType):
        def init(self, **arguments: Any) -> Logged:
            runs.append(Logged(**arguments))
            return runs[-1]

        def Settings(self, **arguments: Any) -> dict[str, Any]:  # noqa: N802  # as it is called there
            return arguments

    monkeypatch.setitem(sys.modules, "wandb", Module("wandb"))
    return runs


def test_wandb_is_told_the_figures_over_their_own_steps(tmp_path: Path, wandb_runs: list[Logged]) -> None:
    folder = tmp_path / "tale"
    write_all(Run(folder, settings={"train": {"steps": 3}}), "wandb")
    (run,) = wandb_runs
    assert run.arguments["name"] == "tale"
    assert run.arguments["config"] == {"train": {"steps": 3}}
    assert run.arguments["resume"] is None
    assert run.axes == [("step", None), ("*", "step")]
    assert [(row["step"], row["loss/train"]) for row in run.rows[:3]] == LOSSES
    assert run.rows[3] == {"step": 3, "loss/held_out": 2.5, "perplexity/held_out": math.exp(2.5)}
    assert run.finished


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, wandb_runs: list[Logged]) -> None:
    write_all(Run(tmp_path), "wandb")
    write_all(Run(tmp_path, after=2), "wandb")
    write_all(Run(tmp_path), "wandb")
    assert [(run.arguments["id"], run.arguments["resume"]) for run in wandb_runs] == [
        (None, None),
        ("new", "allow"),
        (None, None),
    ]


@pytest.mark.thorough
def test_wandb_itself_writes_the_figures_offline(tmp_path: Path) -> None:
    """W&B writes the figures offline. It has a separate process, because it leaves a service and threads behind."""
    script = (
        "from tests.observe.test_sinks import *\n"
        f"write_all(Run(Path({str(tmp_path)!r}), settings={{'train': {{'steps': 3}}}}), 'wandb')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "WANDB_MODE": "offline", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    for word in (b"loss/train", b"loss/held_out", b"tokens_per_s"):
        assert word in content
    assert (tmp_path / "wandb_run").read_text().strip() in written.name


# ------------------------------------------------------------------------------------------------------- failures


class Failing(MetricsSink):
    """A sink whose service fails after the first row."""

    def __init__(self, run: Run) -> None:
        self.closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step > 1:
            raise ConnectionError("no route to host")

    def rewind(self, step: int) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


def test_a_service_that_is_down_is_left_out_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sinks.SINKS, "mlflow", sinks._Known("mlflow", Failing, ""))
    writer = MetricsWriter(Run(tmp_path), ["tensorboard", "mlflow"])
    writer.write(TRAIN[0])
    with pytest.warns(UserWarning, match="no longer written to mlflow: no route to host; all of them are in .*jsonl"):
        writer.write(TRAIN[1])
    writer.write(TRAIN[2])  # the failed sink is not called again
    writer.rewind(2)
    writer.close()
    assert read_metrics(tmp_path / METRICS_FILE)[0] == TRAIN[:2]
    assert scalars(tmp_path, "loss/train") == LOSSES[:2]


@needs_full_disk
def test_a_full_disk_is_an_error_and_the_sinks_are_closed(tmp_path: Path) -> None:
    writer, sink = MetricsWriter(Run(tmp_path)), mock.create_autospec(MetricsSink, instance=True)
    writer._sinks["tensorboard"] = sink
    fill_disk(writer)
    for call in (lambda: writer.write(TRAIN[0]), writer.close):
        with pytest.raises(PartitaError, match=r"cannot write metrics into '.*': No space left on device; set train"):
            call()
    sink.close.assert_called_once_with()


@pytest.mark.parametrize("number", [9, 99])
def test_rewinding_at_once_leaves_out_later_steps(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An immediate rewind hides the later steps, although readers sort file 10 of a second before its file 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(number))
    writer = MetricsWriter(Run(tmp_path), ["tensorboard"])
    for row in TRAIN[:3]:
        writer.write(row)
    writer.rewind(2)
    writer.close()
    assert scalars(tmp_path, "loss/train") == LOSSES[:2]


def test_a_service_that_cannot_be_opened_is_an_error_and_closes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(run: Run) -> MetricsSink:
        raise ValueError("no API key")

    closed = list[str]()
    monkeypatch.setattr(sinks.TensorBoard, "close", lambda self: closed.append("tensorboard"))
    monkeypatch.setitem(sinks.SINKS, "wandb", sinks._Known("wandb", refusing, "a login"))
    with pytest.raises(PartitaError, match="metrics cannot be written to wandb: no API key; it needs a login"):
        MetricsWriter(Run(tmp_path), ["tensorboard", "wandb"])
    assert closed == ["tensorboard"]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    check_installed(["tensorboard", "mlflow"], "train.metrics")
    with pytest.raises(ConfigError, match=r"train\.metrics: wandb is not installed: pip install wandb, or remove it"):
        check_installed(["tensorboard", "wandb"], "train.metrics")


def test_every_sink_is_one(tmp_path: Path, wandb_runs: list[Logged], store: Any) -> None:
    for name in sinks.SINKS:
        if name != "mlflow":
            sink = open_sink(name, Run(tmp_path))
            assert isinstance(sink, MetricsSink)
            sink.close()
