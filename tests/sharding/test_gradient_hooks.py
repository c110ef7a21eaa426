"""A user's hooks on parameters see and change gradients as in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from tests.kit.ranks import on_ranks


def halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def clear(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.zero_()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def after_accumulation(config: dict[str, Any]) -> list[float]:
    """Return the norms of a gradient with a hook that halves it, and without, relative to plain PyTorch.

    The hook is registered at three different times. It is removed after the first step of each run.
    """
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    alone = build()
    alone(x).square().mean().backward()
    expected = alone[0].weight.grad
    assert isinstance(expected, Tensor)
    found = []
    for moment in ("before initialize", "after initialize", "after forward"):
        model = build()
        weight = model[0].weight
        assert isinstance(weight, nn.Parameter)
        if moment == "before initialize":
            handle = weight.register_post_accumulate_grad_hook(halve)
        with partita.initialize(model, config, optimizer=lambda params: torch.optim.SGD(params, lr=0.0)) as engine:
            if moment == "after initialize":
                handle = weight.register_post_accumulate_grad_hook(halve)
            for removed in (False, True):
                if removed:
                    handle.remove()
                loss = engine(x).square().mean()
                if moment == "after forward" and not removed:
                    handle = weight.register_post_accumulate_grad_hook(halve)
                engine.backward(loss)
                gradient = engine.gradient("0.weight")
                assert gradient is not None
                torch.testing.assert_close(gradient, expected if removed else expected / 2)
                found.append((gradient.norm() / expected.norm()).item())
                engine.step()
        weight.register_post_accumulate_grad_hook(halve).remove()  # works after the engine's own hook is gone
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_hooks_after_accumulation_find_the_gradient_and_may_change_it(world: int) -> None:
    for stage in range(4):
        config = {"zero": {"stage": stage}}
        for found in on_ranks(world, after_accumulation, config):
            assert found == pytest.approx([0.5, 1.0] * 3)


def test_hooks_after_accumulation_come_before_an_update_in_backward() -> None:
    model = build()
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    before = weight.detach().clone()
    config = {"precision": {"gradients": "in_backward"}}
    with partita.initialize(model, config, optimizer=lambda params: torch.optim.SGD(params, lr=1.0)) as engine:
        weight.register_post_accumulate_grad_hook(clear)
        engine.backward(engine(torch.ones(4, 8)).square().mean())
        engine.step()
        with engine.gathered():
            assert torch.equal(weight, before)
