"""What is written into parameters that rest whole lasts, whatever the optimizer updates in their place."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import PartitaError
from tests import seeds
from tests.local import pool
from tests.local.training import Stack, rank, square_loss, whole_weights, world
from tests.matrix import matrix

STILL = {"name": "sgd", "lr": 0.0, "momentum": 0.9, "weight_decay": 0.0}
BF16 = {"compute": "bf16"}
PLANS: dict[str, dict[str, Any]] = {
    "fp32": {"zero": {"stage": 1}},
    "stage 0": {"zero": {"stage": 0}, "precision": BF16},
    "stage 2": {"zero": {"stage": 2}, "precision": BF16},
    "fp16": {"zero": {"stage": 1}, "precision": {"compute": "fp16", "loss_scale": 8.0}},
    "split": {"zero": {"stage": 1}, "precision": {**BF16, "master": "split"}},
    "host": {"zero": {"stage": 1, "offload": {"optimizer": "host"}}},
    "disk": {"zero": {"stage": 2, "offload": {"optimizer": "disk"}}, "precision": BF16},
    "in backward": {"zero": {"stage": 2}, "precision": {**BF16, "gradients": "in_backward"}},
}


def fresh_values(module: nn.Module) -> dict[str, Tensor]:
    """Multiples of 1/128 below 2, which bf16 and fp16 both have."""
    generator = seeds.generator(7)
    named = module.named_parameters()
    return {name: torch.randn(p.shape, generator=generator).mul(32).round() / 128 for name, p in named}


def train_step(engine: partita.Engine, step: int) -> None:
    engine.backward(square_loss(engine, rank(), step))
    assert engine.step().stepped


def holds(engine: partita.Engine, expected: Mapping[str, Tensor]) -> None:
    """In the parameters, and in the values that the optimizer updates."""
    for found in (whole_weights(engine), engine.state_dict()):
        for name, value in found.items():
            assert torch.equal(value.float(), expected[name]), name


def lasts(plan: str, folder: Path) -> None:
    seeds.start()
    config = {**PLANS[plan], "optimizer": STILL, "checkpoint": {"dir": str(folder), "background": False}}
    with partita.initialize(Stack(2), config) as engine:
        train_step(engine, 0)
        expected = fresh_values(engine.module)
        engine.module.load_state_dict(expected)
        train_step(engine, 1)
        holds(engine, expected)
        with torch.no_grad():
            for param in engine.module.parameters():
                param.clamp_(-0.5, 0.5)
        clamped = {name: value.clamp(-0.5, 0.5) for name, value in expected.items()}
        holds(engine, clamped)
        train_step(engine, 2)
        holds(engine, clamped)
        nn.init.ones_(engine.module.last.weight)
        engine.save()
        nn.init.zeros_(engine.module.first.weight)
        engine.load()
        holds(engine, {**clamped, "last.weight": torch.ones(16, 16)})
        train_step(engine, 3)
        holds(engine, {**clamped, "last.weight": torch.ones(16, 16)})


def leaves_the_rest() -> None:
    """A master weight keeps its digits where nothing else was written."""
    seeds.start()
    with partita.initialize(Stack(1), {**PLANS["stage 2"], "optimizer": {"lr": 1e-3}}) as engine:
        train_step(engine, 0)
        before = engine.state_dict()
        with torch.no_grad():
            engine.module.first.weight[0] = 1.0
        after = engine.state_dict()
        if rank() == 0:
            assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())
            assert torch.equal(after["first.weight"][0], torch.ones(16))
            before["first.weight"][0] = 1.0
            assert all(torch.equal(after[name], value) for name, value in before.items())


def _one_more(engine: partita.Engine) -> None:
    if rank():
        nn.init.zeros_(engine.module.first.weight)


def _other_values(engine: partita.Engine) -> None:
    nn.init.constant_(engine.module.first.weight, float(rank()))


def differs(write: Callable[[partita.Engine], None], plan: str, use: str) -> str:
    with partita.initialize(Stack(1), {**PLANS[plan], "optimizer": STILL}) as engine:
        train_step(engine, 0)
        write(engine)
        with pytest.raises(PartitaError) as raised:
            train_step(engine, 1) if use == "step" else engine.state_dict()
        engine.zero_grad()
        with engine.gathered(engine.module.first, modify=True):
            nn.init.ones_(engine.module.first.weight)
        train_step(engine, 2)
        assert torch.equal(whole_weights(engine)["first.weight"].float(), torch.ones(16, 16))
        assert world() == 2
        return str(raised.value)


@matrix(plan=PLANS, world=[1, 2])
def test_what_is_written_lasts(plan: str, world: int, tmp_path: Path) -> None:
    pool.run(world, lasts, plan, tmp_path)


def test_other_values_are_left_alone() -> None:
    pool.run(2, leaves_the_rest)


@matrix(write=[_one_more, _other_values], plan=["stage 2", "host", "in backward"], use=["step", "state_dict"])
def test_ranks_that_write_differently_are_told(write: Any, plan: str, use: str) -> None:
    for said in pool.run(2, differs, write, plan, use):
        assert "rank 1 wrote other values into parameters than rank 0" in said
        assert "'first.weight'" in said
        assert "engine.gathered(..., modify=True)" in said
