"""Changes by users between a save and a load, which must not silently lose states."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import partita
from partita import PartitaError
from partita.checkpoint.format.manifest import MANIFEST, with_checksum
from partita.engine.engine import Engine
from tests.kit import seeds


def _engine(folder: str | Path | None = None, optimizer: Callable[..., Optimizer] | None = None) -> Engine:
    seeds.start()
    config: dict[str, Any] = {"checkpoint": {"dir": str(folder)}} if folder is not None else {}
    return partita.initialize(nn.Linear(3, 3), config, optimizer=optimizer)


def _train(engine: Engine) -> None:
    engine.backward(engine(torch.ones(2, 3)).square().mean())
    engine.step()


def _momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


def _saved(folder: Path, optimizer: Callable[..., Optimizer] | None = None) -> Path:
    with _engine(folder, optimizer) as engine:
        _train(engine)
        return engine.save()


def test_checkpoints_of_a_run_are_in_one_folder_wherever_the_process_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with _engine("run") as engine:
        for folder, step in ((None, 1), ("named", 2)):
            monkeypatch.chdir(tmp_path)
            _train(engine)
            path = engine.save(folder)
            monkeypatch.chdir(tmp_path / "elsewhere")
            engine.wait_for_checkpoint()
            assert path == tmp_path / (folder or "run") / f"step-{step}"
            assert path.is_dir()
        assert engine.load().step == 1
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["file", "link"])
def test_a_folder_that_is_none_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with _engine() as engine, pytest.raises(PartitaError, match="is a file, or a link to nothing: name a folder"):
        engine.save(tmp_path / name)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    manifest = json.loads("".join((path / MANIFEST).read_text().splitlines()[:-1]))
    (path / MANIFEST).write_bytes(with_checksum({**manifest, "format": 2}))
    with _engine(tmp_path) as engine, pytest.raises(PartitaError, match=r"has format 2 .*update partita"):
        engine.load()


@pytest.mark.filterwarnings("ignore:.*is configured differently:UserWarning", "ignore:.*was saved with:UserWarning")
@pytest.mark.parametrize(("before", "after"), [(_momentum, None), (None, _momentum)])
def test_states_of_another_optimizer(
    before: Callable[..., Optimizer] | None, after: Callable[..., Optimizer] | None, tmp_path: Path
) -> None:
    _saved(tmp_path, before)
    with _engine(tmp_path, after) as engine:
        _train(engine)
        states = set(engine.optimizer_state("weight"))
        with pytest.raises(PartitaError, match="holds the states of another optimizer"):
            engine.load()
        assert set(engine.optimizer_state("weight")) == states
        assert "optimizer.state.*" in engine.load(strict=False).missing
        _train(engine)
        assert set(engine.optimizer_state("weight")) == states


def test_values_that_hold_themselves(tmp_path: Path) -> None:
    with _engine(tmp_path) as engine:
        engine.extra["itself"] = engine.extra
        with pytest.raises(PartitaError, match="engine.extra is nested too deeply, or contains itself"):
            engine.save()


CALLS: dict[str, Callable[[Engine], Any]] = {
    "gathered": lambda engine: engine.gathered(),
    "gradient": lambda engine: engine.gradient("weight"),
    "optimizer_state": lambda engine: engine.optimizer_state("weight"),
    "state_dict": lambda engine: engine.state_dict(),
    "export": lambda engine: engine.export("there"),
    "save": lambda engine: engine.save("there"),
    "load": lambda engine: engine.load("there"),
    "mean": lambda engine: engine.mean(1.0),
    "zero_grad": lambda engine: engine.zero_grad(),
    "no_sync": lambda engine: engine.no_sync().__enter__(),
    "train_batch": lambda engine: engine.train_batch([]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_engine_says_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with _engine() as engine:
        _train(engine)
    with pytest.raises(PartitaError, match="the engine is closed"):
        CALLS[name](engine)
    assert not list(tmp_path.iterdir())
