"""Optimizer states and averages of layers that are frozen while a run is resumed are saved, and used again after
unfreezing.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita.engine.averages import Ema
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import ADAMW

HOST = {"optimizer": "host", "parameters": "host"}
DISK = {"optimizer": "disk", "parameters": "disk"}


def steps(engine: partita.Engine, num_steps: int, first: int) -> None:
    for step in range(first, first + num_steps):
        engine.backward(square_loss(engine, engine.mesh.rank, step))
        engine.step()


def opened(config: dict[str, Any], *, frozen: bool) -> partita.Engine:
    seeds.start(0)
    model = Stack(3)
    if frozen:
        next(model.children()).requires_grad_(False)
    return partita.initialize(model, config)


def states_of(engine: partita.Engine) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value
        for name, _ in engine.module.named_parameters()
        for key, value in engine.optimizer_state(name).items()
    }


def resumed(folder: str, config: dict[str, Any]) -> bool:
    """Freeze a layer at step 2; resume at steps 3 and 4 with the layer frozen before ``initialize``.

    Return True if the weights are those of the uninterrupted run.
    """
    with opened(config, frozen=False) as engine:
        steps(engine, 2, 0)
        next(engine.module.children()).requires_grad_(False)
        steps(engine, 1, 2)
        engine.save(f"{folder}/first")
        steps(engine, 1, 3)
        next(engine.module.children()).requires_grad_(True)
        steps(engine, 2, 4)
        weights, states = engine.state_dict(), states_of(engine)
    with opened(config, frozen=True) as engine:
        engine.load(f"{folder}/first")
        steps(engine, 1, 3)
        engine.save(f"{folder}/second")
    with opened(config, frozen=True) as engine:
        engine.load(f"{folder}/second")
        next(engine.module.children()).requires_grad_(True)
        steps(engine, 2, 4)
        found, kept = engine.state_dict(), states_of(engine)
    assert states.keys() == kept.keys()
    assert any("exp_avg" in name for name in states)
    assert all(torch.equal(states[name], kept[name]) for name in states)
    return all(torch.equal(weights[name], found[name]) for name in weights)


@matrix(ranks=[1, 2], stage=[0, 1, 3], offload=[{}, HOST, DISK])
def test_states_of_frozen_layers_are_loaded_and_saved(
    ranks: int, stage: int, offload: dict[str, str], tmp_path: Path
) -> None:
    config = {"zero": {"stage": stage, "offload": offload if stage == 3 else {}}, "optimizer": ADAMW}
    assert all(on_ranks(ranks, resumed, str(tmp_path), config))


@pytest.mark.parametrize("stage", [1, 3])
def test_8_bit_moments_of_frozen_layers_are_loaded_and_saved(stage: int, tmp_path: Path) -> None:
    config = {"zero": {"stage": stage}, "optimizer": ADAMW, "precision": {"moments": "int8"}}
    assert all(on_ranks(2, resumed, str(tmp_path), config))


def averaged(engine: partita.Engine, ema: Ema) -> dict[str, Tensor]:
    with ema.applied():
        return engine.state_dict()


def averages_resumed(folder: str, config: dict[str, Any]) -> None:
    """Unfreeze a layer at step 1, and save at step 3. Resume with the layer frozen before ``initialize``, and unfreeze
    it before the load, after it, or after another save and load.
    """
    with opened(config, frozen=True) as engine:
        ema = engine.ema(0.5)
        steps(engine, 1, 0)
        engine.module.requires_grad_(True)
        steps(engine, 2, 1)
        engine.save(f"{folder}/first")
        steps(engine, 1, 3)
        expected, weights = averaged(engine, ema), engine.state_dict()
    assert engine.mesh.rank or not torch.equal(expected["first.weight"], weights["first.weight"])
    for source, when in (("first", "before"), ("first", "after"), ("second", "after")):
        with opened(config, frozen=True) as engine:
            ema = engine.ema(0.5)
            engine.module.requires_grad_(when == "before")
            engine.module.blocks.requires_grad_(True)
            engine.module.last.requires_grad_(True)
            engine.load(f"{folder}/{source}")
            engine.save(f"{folder}/second")
            engine.module.requires_grad_(True)
            steps(engine, 1, 3)
            found = averaged(engine, ema)
        assert found.keys() == expected.keys()
        differ = [name for name, value in found.items() if not torch.equal(value, expected[name])]
        assert not differ, (source, when, differ)


@pytest.mark.parametrize(("stage", "offload"), [(0, {}), (1, {}), (3, {}), (3, HOST), (3, DISK)])
def test_averages_of_frozen_layers_are_loaded_and_saved(stage: int, offload: dict[str, str], tmp_path: Path) -> None:
    config = {"zero": {"stage": stage, "offload": offload}, "optimizer": ADAMW}
    on_ranks(2, averages_resumed, str(tmp_path), config)
