"""Groups that are added to an optimizer while it trains are saved, and loaded if they are added before the load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita import PartitaError
from partita.checkpoint.format.stored import open_stored
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.plans import TIERS, ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights

ADDED = ["last.weight", "last.bias"]


def opened(zero: dict[str, Any], *, frozen: bool = False) -> partita.Engine:
    """Return an engine whose optimizer does not have the last layer."""
    seeds.start()
    model = Stack(2)
    model.last.requires_grad_(not frozen)
    params = [*model.first.parameters(), *model.blocks.parameters()]
    return partita.initialize(model, {"zero": zero}, optimizer=torch.optim.AdamW(params, lr=0.01, eps=1e-3))


def add_group(engine: partita.Engine) -> None:
    engine.optimizer.add_param_group({"params": [engine.module.get_parameter(name) for name in ADDED], "lr": 0.1})


def train(engine: partita.Engine, first: int, num_steps: int) -> dict[str, Tensor]:
    """Train; return the weights and optimizer states."""
    for step in range(first, first + num_steps):
        engine.backward(square_loss(engine, rank(), step))
        engine.step()
    return whole_weights(engine) | states_of(engine)


def states_of(engine: partita.Engine) -> dict[str, Tensor]:
    names = [name for name, _ in engine.module.named_parameters()]
    return {f"{name}.{key}": value for name in names for key, value in engine.optimizer_state(name).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def added_before_the_load(folder: Path, zero: dict[str, Any]) -> None:
    with opened(zero) as engine:
        train(engine, 0, 1)
        add_group(engine)
        before = engine.save(folder / "before the first step with it")
        train(engine, 1, 2)
        path = engine.save(folder)
        states = states_of(engine)
        expected = train(engine, 3, 2)
    assert open_stored(before).value("optimizer.param_groups.1.params") == ADDED
    assert "last.weight.exp_avg" in states
    for frozen in (False, True):
        with opened(zero, frozen=frozen) as engine:
            add_group(engine)
            restored = engine.load(path)
            assert (restored.missing, restored.unexpected) == ((), ())
            assert engine.optimizer.param_groups[1]["lr"] == 0.1
            assert same(states_of(engine), states)
            engine.module.last.requires_grad_(True)
            assert same(train(engine, 3, 2), expected)


@pytest.mark.parametrize("plan", ["0", "1", "3", "3-disk"])
def test_a_group_that_is_added_before_the_load(plan: str, tmp_path: Path) -> None:
    on_ranks(2, added_before_the_load, tmp_path, {**ZERO, **TIERS}[plan])


def missing_at_the_load(folder: Path) -> None:
    zero = {"stage": 3}
    with opened(zero) as engine:
        add_group(engine)
        train(engine, 0, 2)
        path = engine.save(folder)
    with opened(zero) as engine:
        before = train(engine, 5, 1)
        message = r"the optimizer has no group 1, which '.*' has \(last\.weight, last\.bias\): call .*add_param_group"
        with pytest.raises(PartitaError, match=message):
            engine.load(path)
        assert same(before, whole_weights(engine) | states_of(engine))
        assert engine.load(path, strict=False).unexpected == ("optimizer.param_groups.1.*",)
    with opened(zero, frozen=True) as engine:
        assert engine.load(path).unexpected == ("optimizer.param_groups.1.*",)
    with opened(zero) as engine:
        engine.optimizer.add_param_group({"params": [engine.module.last.weight]})
        before = whole_weights(engine)
        with pytest.raises(PartitaError, match="the optimizer's group 1 has other parameters than in"):
            engine.load(path)
        assert same(before, whole_weights(engine))


def test_a_stored_group_that_the_optimizer_lacks_is_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    on_ranks(2, missing_at_the_load, tmp_path)
