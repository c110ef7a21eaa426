"""The warm-up of 1-bit Adam counts completed updates; a warning names parameters that had no update in it."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from tests.kit import seeds
from tests.kit.ranks import on_ranks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 512).clone())

    def forward(self, target: Tensor) -> Tensor:
        return 5 * (self.w.float() - target).square().mean()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, target: Tensor) -> Tensor:
        return sum((layer(target) for layer in self.layers), torch.zeros(()))


def train(engine: partita.Engine, first: int, last: int, scale: float = 1.0) -> int:
    skipped = 0
    for step in range(first, last):
        target = scale * torch.randn(512, generator=seeds.generator(2 * step + engine.mesh.rank))
        engine.backward(engine(target))
        skipped += engine.step().skipped
    return skipped


def weights(engine: partita.Engine) -> list[Tensor]:
    with engine.gathered():
        return [param.detach().float().clone() for param in engine.module.parameters()]


def trains_after_skipped_steps(folder: str, stage: int) -> None:
    config = {
        "zero": {"stage": stage},
        "precision": {"compute": "fp16", "initial_loss_scale": 2.0**24},
        "optimizer": {"name": "onebit_adam", "lr": 0.01, "weight_decay": 0.0},
        "communication": {"warmup_steps": 4},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with partita.initialize(Layers(), config) as engine:
            before = weights(engine)
            skipped = train(engine, 0, 30, 50.0)
            assert 4 < skipped < 26
            assert int(engine.optimizer_state("layers.0.w")["step"]) == 4
            assert all(bool((new - old).abs().max() > 0.02) for old, new in zip(before, weights(engine), strict=True))
            engine.save(folder)
            train(engine, 30, 32, 50.0)
            after = weights(engine)
        with partita.initialize(Layers(), config) as engine:
            engine.load(folder)
            train(engine, 30, 32, 50.0)
            assert all(torch.equal(old, new) for old, new in zip(after, weights(engine), strict=True))


@pytest.mark.parametrize("stage", [0, 1])
def test_skipped_steps_are_no_part_of_the_warm_up(stage: int, tmp_path: Any) -> None:
    on_ranks(2, trains_after_skipped_steps, str(tmp_path), stage)


def unfreezes_late() -> list[str]:
    model = Layers()
    model.layers[1].requires_grad_(False)
    config = {"optimizer": {"name": "onebit_adam", "lr": 0.01}, "communication": {"warmup_steps": 2}}
    with partita.initialize(model, config) as engine:
        train(engine, 0, 3)
        model.layers[1].requires_grad_(True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            train(engine, 3, 6)
    return [str(warning.message) for warning in said]


def test_what_had_no_update_in_the_warm_up_is_named_once() -> None:
    for said in on_ranks(2, unfreezes_late):
        assert len(said) == 1
        assert "'layers.1.w' had no update in the warm-up of" in said[0]
        assert "communication.warmup_steps" in said[0]
