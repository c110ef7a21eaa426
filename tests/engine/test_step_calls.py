"""Calls of engine.step() in unusual places or orders: each raises a clear error or trains correctly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, SequentialLR

import partita
from partita import PartitaError
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import ADAMW, rank

IN_BACKWARD = {"precision": {"gradients": "in_backward"}}


def opened(config: dict[str, Any], **given: Any) -> partita.Engine:
    seeds.start(0)
    return partita.initialize(Stack(2), {"optimizer": ADAMW, **config}, **given)


def train(engine: partita.Engine, step: int = 0) -> partita.StepResult:
    engine.backward(square_loss(engine, engine.mesh.rank, step))
    return engine.step()


def steps_without_backward(config: dict[str, Any]) -> list[float]:
    with opened(config) as engine:
        with pytest.raises(PartitaError, match="no parameter has a gradient on any rank"):
            engine.step()
        first = train(engine)
        with pytest.raises(PartitaError, match=r"call engine.backward\(loss\)"):
            engine.step()
        assert engine.scheduler.last_epoch == 1
        second = train(engine, 1)
        assert first.stepped
        assert second.stepped
        return [float(value.sum()) for value in engine.state_dict().values()]


def steps_alone(config: dict[str, Any]) -> list[float]:
    with opened(config) as engine:
        train(engine)
        train(engine, 1)
        return [float(value.sum()) for value in engine.state_dict().values()]


@matrix(ranks=[1, 2], stage=[0, 3], section=[{}, IN_BACKWARD])
def test_a_step_without_a_backward_is_an_error(ranks: int, stage: int, section: dict[str, Any]) -> None:
    config = {"zero": {"stage": max(stage, int(bool(section)))}, **section}
    assert on_ranks(ranks, steps_without_backward, config) == on_ranks(ranks, steps_alone, config)


def one_rank_brings_gradients() -> bool:
    with opened({"zero": {"stage": 3}}) as engine:
        loss = square_loss(engine, engine.mesh.rank, 0)
        engine.backward(loss if engine.mesh.rank else 0.0 * loss)
        return engine.step().stepped


def test_a_rank_may_bring_nothing() -> None:
    assert on_ranks(2, one_rank_brings_gradients) == [True, True]


def halved(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


SCHEDULERS = {
    "config": None,
    "lambda": halved,
    "sequential": lambda optimizer: SequentialLR(optimizer, [halved(optimizer), halved(optimizer)], milestones=[5]),
    "chained": lambda optimizer: ChainedScheduler([halved(optimizer)], optimizer),
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_scheduler_is_not_stepped_twice(name: str) -> None:
    with opened({}, scheduler=SCHEDULERS[name]) as engine:
        scheduler: LRScheduler = engine.scheduler
        train(engine)
        rates = train(engine, 1).lr
        if name != "config":
            assert rates == (0.5 * ADAMW["lr"],)
        scheduler.step()
        with pytest.raises(PartitaError, match=r"scheduler.step\(\) was called in addition to engine.step\(\)"):
            train(engine, 2)


def test_a_scheduler_of_ones_own_is_ones_own_to_step(tmp_path: Any) -> None:
    with opened({}) as engine:
        scheduler = halved(engine.optimizer)
        for step in range(3):
            assert train(engine, step).lr == (ADAMW["lr"] * 0.5**step,)
            scheduler.step()
        engine.save(tmp_path)
        train(engine, 3)
        engine.load(tmp_path)  # the engine's own scheduler goes back by one step
        train(engine, 3)
        engine.load(tmp_path)
        train(engine, 3)


def large(stage: int, offload: dict[str, str], clip: float | None) -> tuple[bool, float | None, float]:
    seeds.start(0)
    config = {
        "zero": {"stage": stage, "offload": offload},
        "optimizer": {"name": "sgd", "lr": 1e-24 if clip is None else 1.0, "weight_decay": 0.0},
        "clip_grad_norm": clip,
    }
    model = nn.Linear(64, 64, bias=False)
    before = model.weight.detach().clone()
    with partita.initialize(model, config) as engine:
        engine.backward(engine(torch.full((2, 64), 1e18)).sum())
        result = engine.step()
        with engine.gathered(model):
            moved = float((model.weight.detach() - before).norm())
    return result.stepped, result.grad_norm, moved


@matrix(ranks=[1, 2], stage=[1, 3], tier=["none", "host", "disk"], clip=[None, 1.0])
def test_the_norm_of_large_finite_gradients_is_finite(ranks: int, stage: int, tier: str, clip: float | None) -> None:
    offload = {} if tier == "none" else {"optimizer": tier}
    for stepped, norm, moved in on_ranks(ranks, large, stage, offload, clip):
        assert stepped
        assert norm == pytest.approx(2e18 * 64, rel=1e-6)
        assert moved == pytest.approx(2e18 * 64 * 1e-24 if clip is None else 1.0, rel=1e-2)


def fails_to_save(folder: str) -> None:
    """Catch the error of a step whose checkpoint cannot be saved, and train on."""
    config = {"checkpoint": {"dir": folder, "every_steps": 1}, "batch": {"accumulate": 2}}
    with partita.initialize(Stack(1), config) as engine:
        for batch in range(2):
            for micro in range(2):
                engine.backward(square_loss(engine, rank(), 2 * batch + micro))
                if micro:
                    with pytest.raises(PartitaError, match="checkpoint"):
                        engine.step()
                else:
                    assert not engine.step().stepped
            assert engine.global_step == batch + 1


def test_a_batch_is_over_although_its_checkpoint_cannot_be_saved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    on_ranks(1, fails_to_save, str(tmp_path / "file" / "inner"))
