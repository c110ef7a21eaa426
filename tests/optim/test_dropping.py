"""Gradients that the user drops between backward and the step: those of a batch, or of some parameters."""

from typing import Any

import pytest
import torch

import partita
from partita.errors import PartitaError
from tests.kit.models import Stack, square_loss
from tests.kit.plans import TIERS, ZERO, matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, rank, whole_weights

STEPS = 3


def trained(plan: str, drops: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train with an additional batch before each step, dropped by ``zero_grad()`` of the ``module`` or ``engine``."""
    model = Recipe(lambda: Stack(2)).built()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=0.1)
    with partita.initialize(model, {"zero": (ZERO | TIERS)[plan], **config}, optimizer=optimizer) as engine:
        for step in range(STEPS):
            engine.backward(square_loss(engine, rank(), 100 + step))
            (model if drops == "module" else engine).zero_grad()
            for again in range(2):  # the gradients of several backwards add up
                engine.backward(square_loss(engine, rank(), 10 * step + again))
            assert engine.step().stepped
        return whole_weights(engine)


def a_batch(plan: str, config: dict[str, Any]) -> None:
    expected, found = (trained(plan, drops, config) for drops in ("engine", "module"))
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def one_parameter(plan: str, clips: bool) -> None:
    """Check that a parameter without a gradient keeps values and states, as in torch, and is not part of the norm."""
    config = {"zero": (ZERO | TIERS)[plan], **({"clip_grad_norm": 0.05} if clips else {})}
    build = Recipe(lambda: Stack(2)).built
    plain, model = build(), build()
    names = [name for name, _ in model.named_parameters()]
    dropped = names[0]
    theirs = torch.optim.Adam(plain.parameters(), 1e-2, weight_decay=0.1, eps=1e-3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=0.1, eps=1e-3)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    with partita.initialize(model, config, optimizer=optimizer) as engine:
        for step in range(STEPS):
            torch.stack([square_loss(plain, other, step) for other in range(ranks)]).mean().backward()
            engine.backward(square_loss(engine, rank(), step))
            if step != 1:
                for each in (plain, model):
                    dict(each.named_parameters())[dropped].grad = None
            if clips:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            engine.step()
            theirs.step()
            theirs.zero_grad()
        found = whole_weights(engine)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)


def refused(plan: str) -> None:
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with partita.initialize(model, {"zero": (ZERO | TIERS)[plan]}, optimizer=optimizer) as engine:

        def backward() -> None:
            engine.backward(square_loss(engine, rank(), 0))

        backward()
        next(iter(model.parameters())).grad = None
        with pytest.raises(PartitaError, match=r"a backward after the .grad of '.*' was set to None, but not that of"):
            backward()
        engine.zero_grad()
        backward()
        engine.clip_grad_norm(1.0)
        model.zero_grad()
        with pytest.raises(PartitaError, match=r"was set to None after engine.clip_grad_norm\(\)"):
            engine.step()
        engine.zero_grad()
        backward()
        if rank() == 0:
            next(iter(model.parameters())).grad = None
        with pytest.raises(PartitaError, match=r"engine.step: some ranks have dropped the gradient of '.*'.*all ranks"):
            engine.step()
        engine.zero_grad()
        backward()
        if rank() == 0:
            model.zero_grad()
        backward()
        with pytest.raises(PartitaError, match=r"engine.step: some ranks have dropped the gradients of a batch"):
            engine.step()


def after_the_update() -> None:
    model = Stack(2)
    config = {"zero": {"stage": 3}, "precision": {"gradients": "in_backward"}}
    with partita.initialize(model, config) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        model.zero_grad()
        with pytest.raises(PartitaError, match="in_backward has already updated the parameter"):
            engine.step()


@matrix(plan=["0", "1", "2", "3", "3-host"], config=[{}, {"precision": {"compute": "bf16"}}], world=[1, 2])
def test_a_batch_that_the_module_drops(plan: str, config: dict[str, Any], world: int) -> None:
    on_ranks(world, a_batch, plan, config)


@matrix(plan=["0", "1", "2", "3", "3-host", "3-disk"], clips=[False, True], world=[1, 2])
def test_a_parameter_whose_gradient_is_dropped_is_not_updated(plan: str, clips: bool, world: int) -> None:
    on_ranks(world, one_parameter, plan, clips)


@pytest.mark.parametrize("plan", ["1", "3"])
def test_what_cannot_be_dropped(plan: str) -> None:
    on_ranks(2, refused, plan)


def test_updated_in_backward() -> None:
    on_ranks(2, after_the_update)
