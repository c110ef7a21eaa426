"""Metrics logged by ``engine.log``: rows, sinks, resumed and rewound runs, and errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import partita
from partita import ConfigError, PartitaError
from partita.observe.metrics import METRICS_FILE
from partita.train.job import load_job
from tests.kit.models import Stack, square_loss
from tests.kit.ranks import on_ranks
from tests.kit.training import rank
from tests.observe.full_disk import fill_disk, needs_full_disk


def config_of(folder: Path, **sections: Any) -> dict[str, Any]:
    return {"zero": {"stage": 3}, "metrics": {"dir": str(folder)}, **sections}


def rows(folder: Path) -> list[tuple[int, dict[str, float]]]:
    lines = (folder / METRICS_FILE).read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert {row["kind"] for row in found} == {"logged"}
    return [(row["step"], row["values"]) for row in found]


def run(engine: partita.Engine, steps: int) -> None:
    for _ in range(steps):
        loss = square_loss(engine.module, rank(), engine.global_step)
        engine.backward(loss)
        engine.step()
        engine.log({"rank": rank(), "loss": loss})


def logged(folder: Path) -> list[float]:
    losses = []
    with partita.initialize(Stack(2), config_of(folder)) as engine:
        for step in range(2):
            loss = square_loss(engine.module, rank(), step)
            engine.backward(loss)
            engine.step()
            engine.log({"rank": rank(), "loss": loss})
            engine.log({"one element": torch.tensor([2.5])})
            losses.append(loss.item())
    return losses


def test_rank_0_writes_its_values(tmp_path: Path) -> None:
    losses, _ = on_ranks(2, logged, tmp_path / "new" / "run")
    assert rows(tmp_path / "new" / "run") == [
        (1, {"rank": 0.0, "loss": losses[0]}),
        (1, {"one element": 2.5}),
        (2, {"rank": 0.0, "loss": losses[1]}),
        (2, {"one element": 2.5}),
    ]


def resumed(folder: Path) -> None:
    config = config_of(folder, checkpoint={"dir": str(folder / "checkpoints")})
    with partita.initialize(Stack(2), config) as engine:
        run(engine, 2)
        engine.save()
        run(engine, 2)
    with partita.initialize(Stack(2), config) as engine:
        assert engine.resume() is not None
        if rank() == 0:
            assert [step for step, _ in rows(folder)] == [1, 2, 3, 4]
        run(engine, 1)
        if rank() == 0:
            assert [step for step, _ in rows(folder)] == [1, 2, 3]
        run(engine, 1)
        engine.load()  # back to step 2 in the same run
        run(engine, 1)


def test_a_resumed_run_continues_the_rows(tmp_path: Path) -> None:
    on_ranks(2, resumed, tmp_path)
    assert [step for step, _ in rows(tmp_path)] == [1, 2, 3]


def starts_again(folder: Path) -> None:
    """End before the first checkpoint, and start again."""
    config = config_of(folder, checkpoint={"dir": str(folder / "checkpoints")})
    with partita.initialize(Stack(2), config) as engine:
        assert engine.resume() is None
        engine.log({"evaluated": 1.0})
        run(engine, 2)
        assert engine.resume() is None  # its own rows stay
        run(engine, 1)
        if rank() == 0:
            assert [step for step, _ in rows(folder)] == [0, 1, 2, 3]
    with partita.initialize(Stack(2), config) as engine:
        assert engine.resume() is None
        engine.log({"evaluated": 2.0})
        run(engine, 1)


def test_a_run_without_a_checkpoint_starts_its_rows_again(tmp_path: Path) -> None:
    on_ranks(2, starts_again, tmp_path)
    assert [step for step, _ in rows(tmp_path)] == [0, 1]
    assert rows(tmp_path)[0][1] == {"evaluated": 2.0}


def resumes_at_0(folder: Path) -> None:
    """Resume from a checkpoint of step 0 in another engine, and go back to it in the same one."""
    config = config_of(folder, checkpoint={"dir": str(folder / "checkpoints")})
    with partita.initialize(Stack(2), config) as engine:
        engine.log({"evaluated": 1.0})
        engine.save()
        run(engine, 2)
    for num_steps in (2, 1):
        with partita.initialize(Stack(2), config) as engine:
            restored = engine.resume()
            assert restored is not None
            assert restored.step == 0
            run(engine, num_steps)
            if rank() == 0:
                assert [step for step, _ in rows(folder)] == list(range(num_steps + 1))
            engine.load()
            run(engine, 1)
            if rank() == 0:
                assert [step for step, _ in rows(folder)] == [0, 1]


def test_a_checkpoint_of_step_0_keeps_the_rows_until_it(tmp_path: Path) -> None:
    on_ranks(2, resumes_at_0, tmp_path)
    assert rows(tmp_path)[0] == (0, {"evaluated": 1.0})


def test_loading_the_model_alone_does_not_resume_the_rows(tmp_path: Path) -> None:
    with partita.initialize(Stack(2), config_of(tmp_path)) as engine:
        run(engine, 1)
        engine.save(tmp_path / "checkpoints")
    before = rows(tmp_path)
    with partita.initialize(Stack(2), config_of(tmp_path)) as engine:
        engine.load(tmp_path / "checkpoints", only_model=True)
        with pytest.raises(PartitaError, match="holds the rows of an earlier run"):
            run(engine, 1)
    assert rows(tmp_path) == before


def goes_back(folder: Path) -> None:
    """Go back to the checkpoint of step 2: by `load`, before a row of step 3 and of step 2, and by a rewind."""
    checkpoint = {"dir": str(folder / "checkpoints"), "every_steps": 2}
    config = config_of(folder, checkpoint=checkpoint, precision={"nonfinite": "rewind"})
    with partita.initialize(Stack(2), config) as engine:
        run(engine, 3)
        engine.load()
        run(engine, 1)
        if rank() == 0:
            assert [step for step, _ in rows(folder)] == [1, 2, 3]
        engine.load()
        engine.log({"evaluated": 1.0})
        if rank() == 0:
            assert [step for step, _ in rows(folder)] == [1, 2, 2]
        run(engine, 1)
        engine.backward(square_loss(engine.module, rank(), 3) * torch.inf)
        with pytest.warns(UserWarning):
            assert engine.step().rewound_to == 2
        engine.log({"after": 1.0})


def test_a_run_that_goes_back_keeps_the_rows_until_its_checkpoint(tmp_path: Path) -> None:
    on_ranks(2, goes_back, tmp_path)
    assert [(step, next(iter(values))) for step, values in rows(tmp_path)] == [
        (1, "rank"),
        (2, "rank"),
        (2, "evaluated"),
        (2, "after"),
    ]


def test_sinks_get_the_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(tmp_path)
    config["metrics"]["sinks"] = ["tensorboard"]
    with partita.initialize(Stack(2), config) as engine:
        run(engine, 2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("rank")] == [(1, 0.0), (2, 0.0)]


def test_another_run_does_not_replace_the_rows(tmp_path: Path) -> None:
    with partita.initialize(Stack(2), config_of(tmp_path)) as engine:
        run(engine, 1)
    before = rows(tmp_path)
    with partita.initialize(Stack(2), config_of(tmp_path)) as engine:
        with pytest.raises(PartitaError, match=r"engine\.log: '.*metrics\.jsonl' holds the rows of an earlier run"):
            run(engine, 1)
    assert rows(tmp_path) == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": "low"}, "expected a number or a tensor with one element by name; 'loss' is 'low'"),
        ({"loss": torch.zeros(2)}, "'loss' is a tensor of shape [2]"),
    ],
)
def test_values_that_are_no_numbers_are_refused(values: dict[Any, Any], message: str, tmp_path: Path) -> None:
    with partita.initialize(Stack(2), config_of(tmp_path)) as engine:
        with pytest.raises(PartitaError, match=re.escape(message)):
            engine.log(values)
    assert not (tmp_path / METRICS_FILE).exists()


def test_without_a_folder_the_key_is_named() -> None:
    with partita.initialize(Stack(2), {}) as engine:
        with pytest.raises(ConfigError, match=r"engine\.log: there is no folder .*: set metrics\.dir"):
            engine.log({"loss": 1.0})


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with partita.initialize(Stack(2), config_of(tmp_path / "file" / "inner")) as engine:
        with pytest.raises(PartitaError, match=r"into '.*inner': Not a directory; set metrics\.dir"):
            engine.log({"loss": 1.0})


FULL = r"cannot write metrics into '.*': No space left on device; set metrics\.dir"


@needs_full_disk
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_full_disk_is_named_and_the_engine_closes(goes_on: bool, tmp_path: Path) -> None:
    error = pytest.raises(PartitaError, match=FULL) if goes_on else pytest.raises(KeyError, match="the user's")
    with error, partita.initialize(Stack(2), config_of(tmp_path)) as engine:
        run(engine, 1)
        assert engine._log._writer is not None
        fill_disk(engine._log._writer)
        with pytest.raises(PartitaError, match=FULL):
            run(engine, 1)
        if not goes_on:
            raise KeyError("the user's own error, which is not hidden")
    assert engine.mesh._closed
    engine.close()


def test_a_sink_that_is_not_installed_is_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.observe.sinks.installed", lambda name: False)
    with pytest.raises(ConfigError, match=r"metrics\.sinks: mlflow is not installed: pip install mlflow"):
        partita.initialize(Stack(2), {"metrics": {"sinks": ["mlflow"]}})


def test_the_trainer_has_metrics_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.metrics: is for loops that call engine\.log"):
        load_job({"engine": {"metrics": {"dir": str(tmp_path)}}})
