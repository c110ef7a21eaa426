"""1-bit and 0/1 Adam: the running average travels, alike at every stage; with codes that lose nothing it is Adam."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import partita
from partita.config.wires import is_refresh
from partita.kernels import codec as kernels
from partita.plan.residence import BLOCK
from partita.plan.wire import CODECS, Codec
from partita.planner.memory import model_state_bytes
from tests.local import pool
from tests.local.training import PLANS, Recipe, Stack, Trained, inputs, rank, same, square_loss, train, whole_weights

WARM_UP, STEPS = 4, 9
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3, "betas": [0.8, 0.95]}
ONEBIT: dict[str, Any] = {"optimizer": {"name": "onebit_adam", **ADAM}, "communication": {"warmup_steps": WARM_UP}}
ZEROONE: dict[str, Any] = {"optimizer": {"name": "zeroone_adam", "refresh": 2, **ADAM}, "communication": {}}
REFRESHES = (0, 1, 2, 4, 6)


@contextmanager
def lossless() -> Iterator[None]:
    """Signs stand for the values themselves, and nothing is held back."""

    def encode(codec: Codec, values: Tensor, codes: Tensor, *, held: Tensor, **how: Any) -> None:
        codes.copy_((values.float() + held).contiguous().view(torch.uint8))
        held.zero_()

    def decode(codec: Codec, codes: Tensor, out: Tensor, *, add: bool = False, **how: Any) -> None:
        values = codes.view(torch.float32)
        out.add_(values) if add else out.copy_(values)

    with (
        mock.patch.dict(CODECS, sign=Codec("sign", BLOCK * 4)),
        mock.patch.object(kernels, "encode", encode),
        mock.patch.object(kernels, "decode", decode),
    ):
        yield


def reference(num_ranks: int) -> dict[str, Tensor]:
    """Plain PyTorch on all ranks' samples: Adam, whose second moment stands still after the warm-up."""
    model = Recipe(lambda: Stack(2)).built()
    states = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    beta1, beta2 = ADAM["betas"]
    for step in range(STEPS):
        loss = torch.stack([model(inputs(other, step)).square().mean() for other in range(num_ranks)]).mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, param in model.named_parameters():
                (first, second), num = states[name], min(step + 1, WARM_UP)
                first.lerp_(param.grad, 1 - beta1)
                average = first / (1 - beta1 ** (step + 1)) if step < WARM_UP else first
                if step < WARM_UP:
                    second.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                change = average / ((second / (1 - beta2**num)).sqrt() + ADAM["eps"])
                if step >= WARM_UP:
                    change = change.clamp(-1, 1)
                param.mul_(1 - ADAM["lr"] * ADAM["weight_decay"]).sub_(change, alpha=ADAM["lr"])
    return {name: param.detach() for name, param in model.named_parameters()}


def refreshed_reference(num_ranks: int) -> dict[str, Tensor]:
    """Plain PyTorch on all ranks' samples: Adam, whose second moment changes in every step of REFRESHES alone."""
    model = Recipe(lambda: Stack(2)).built()
    states = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    beta1, beta2 = ADAM["betas"]
    for step in range(STEPS):
        loss = torch.stack([model(inputs(other, step)).square().mean() for other in range(num_ranks)]).mean()
        model.zero_grad()
        loss.backward()
        num = sum(refresh <= step for refresh in REFRESHES)
        with torch.no_grad():
            for name, param in model.named_parameters():
                first, second = states[name]
                first.lerp_(param.grad, 1 - beta1)
                if step in REFRESHES:
                    second.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                change = first / (1 - beta1 ** (step + 1)) / ((second / (1 - beta2**num)).sqrt() + ADAM["eps"])
                if step not in REFRESHES:
                    change = change.clamp(-1, 1)
                param.mul_(1 - ADAM["lr"] * ADAM["weight_decay"]).sub_(change, alpha=ADAM["lr"])
    return {name: param.detach() for name, param in model.named_parameters()}


def refreshed_with_an_identity(plans: tuple[str, ...]) -> None:
    expected = refreshed_reference(torch.distributed.get_world_size())
    with lossless():
        runs = [train(Recipe(lambda: Stack(2), config=ZEROONE, num_steps=STEPS), PLANS[plan]) for plan in plans]
    for run in runs:
        for name, weight in run.weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


def with_an_identity(plans: tuple[str, ...]) -> None:
    with lossless():
        runs = [train(Recipe(lambda: Stack(2), config=ONEBIT, num_steps=STEPS), PLANS[plan]) for plan in plans]
    expected = reference(torch.distributed.get_world_size())
    for run in runs:
        for name, weight in run.weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


def alike(plans: tuple[str, ...], codec: str, asked: dict[str, Any]) -> list[float]:
    """Every stage has the same bits; codes lose something and train all the same."""
    config = asked | {"communication": {**asked["communication"], "gradients": codec}, "clip_grad_norm": 0.5}
    first: Trained | None = None
    for plan in plans:
        run = train(Recipe(lambda: Stack(2), config=config, num_steps=STEPS), PLANS[plan])
        first = first or run
        same(run, first, f"{codec} at plan {plan}")
    assert first is not None
    return first.losses


def resumed(folder: Path, plan: str, at: int, asked: dict[str, Any]) -> None:
    """A run that goes on from a checkpoint is the one that was saved, also where codes begin in between."""
    config = {"zero": PLANS[plan], **asked}

    def go(engine: partita.Engine, first: int) -> None:
        for step in range(first, STEPS):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
            if step + 1 == at and not first:
                engine.save(folder)

    with partita.initialize(Stack(2), config) as engine:
        go(engine, 0)
        held = {key: size for key, size in engine.memory_report().held.items() if key[0] in ("feedback", "momentum")}
        planned = model_state_bytes(engine.units, rank())
        assert held == {key: size for key, size in planned.items() if key[0] in ("feedback", "momentum")}
        assert len(held) == 2
        continued = whole_weights(engine)
    with partita.initialize(Stack(2), config) as engine:
        engine.load(folder)
        go(engine, at)
        for name, weight in whole_weights(engine).items():
            assert torch.equal(weight, continued[name]), name


def test_with_codes_that_lose_nothing_it_is_adam() -> None:
    pool.run(2, with_an_identity, ("0", "2"))


def test_with_codes_that_lose_nothing_the_refreshed_one_is_adam() -> None:
    assert [step for step in range(24) if is_refresh(step, 2)] == [*REFRESHES, 10, 14, 22]
    pool.run(2, refreshed_with_an_identity, ("0", "2"))


@pytest.mark.parametrize(("codec", "asked"), [("full", ONEBIT), ("ternary", ONEBIT), ("full", ZEROONE)], ids=str)
def test_every_stage_has_the_same_bits(codec: str, asked: dict[str, Any]) -> None:
    losses, *_ = pool.run(2, alike, ("0", "1", "2", "3"), codec, asked)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("plan", "at", "asked"), [("1", 6, ONEBIT), ("3", 2, ONEBIT), ("2", 5, ZEROONE)], ids=str)
def test_a_resumed_run_is_the_continued_one(tmp_path: Path, plan: str, at: int, asked: dict[str, Any]) -> None:
    pool.run(2, resumed, tmp_path, plan, at, asked)


def test_alone_it_is_adam_too() -> None:
    """One process, in which nothing travels."""
    model = Recipe(lambda: Stack(2)).built()
    with partita.initialize(model, ONEBIT) as engine:
        for step in range(STEPS):
            engine.backward(square_loss(engine, 0, step))
            engine.step()
        weights = whole_weights(engine)
    for name, expected in reference(1).items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)


def test_another_optimizer_has_no_average_to_send() -> None:
    with pytest.raises(partita.ConfigError, match="an optimizer was passed"):
        partita.initialize(Stack(1), ONEBIT, optimizer=lambda params: torch.optim.AdamW(params))
