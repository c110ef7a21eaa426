"""Hooks on the optimizer's step find all parameters updated, and what they write into parameters is kept."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.plans import matrix, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*was written in place in:UserWarning")

BF16 = {"compute": "bf16"}
BOUND = 2.0**-5  # smaller than most weights
# Plans whose units are updated by the optimizer's own step, and published after it.
INLINE: dict[str, dict[str, Any]] = {
    "stage 1": {"zero": {"stage": 1}},
    "stage 0 in bf16": {"zero": {"stage": 0}, "precision": BF16},
    "stage 2 in bf16": {"zero": {"stage": 2}, "precision": BF16},
    "stage 3 in bf16": {"zero": {"stage": 3}, "precision": BF16},
}
# Plans with overlapped updates.
OTHERS: dict[str, dict[str, Any]] = {
    "kernels": {"zero": {"stage": 1}, "precision": BF16},
    "kernels, stage 3": {"zero": {"stage": 3}, "precision": BF16},
    "split": {"zero": {"stage": 2}, "precision": {**BF16, "master": "split"}},
    "host": {"zero": {"stage": 1, "offload": {"optimizer": "host"}}},
    "disk": {"zero": {"stage": 2, "offload": {"optimizer": "disk"}}, "precision": BF16},
    "in backward": {"zero": {"stage": 2}, "precision": {**BF16, "gradients": "in_backward"}},
    "split, in backward": {
        "zero": {"stage": 1},
        "precision": {**BF16, "master": "split", "gradients": "in_backward"},
    },
}
PLANS = {**INLINE, **OTHERS}


def engine_of(plan: str, optimizer: Any = None) -> partita.Engine:
    seeds.start()
    if plan in INLINE and optimizer is None:
        optimizer = torch.optim.AdamW
    config = PLANS[plan] if optimizer is not None else {**PLANS[plan], "optimizer": {"lr": 1e-3}}
    return partita.initialize(Stack(2), config, optimizer=optimizer)


def values_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def clamp(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.clamp_(-BOUND, BOUND)


def clamp_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.data.clamp_(-BOUND, BOUND)


def finds_updated(plan: str, optimizer: Any = None) -> None:
    with engine_of(plan, optimizer) as engine:
        found = list[dict[str, Tensor]]()
        engine.optimizer.register_step_post_hook(lambda *_: found.append(values_of(engine.module)))
        before = whole_weights(engine)
        for step in range(3):
            engine.backward(square_loss(engine, rank(), step))
            assert engine.step().stepped
            after = whole_weights(engine)
            assert [name for name, value in after.items() if not torch.equal(found[-1][name], value)] == []
            assert not torch.equal(after["first.weight"], before["first.weight"])
            before = after
        assert len(found) == 3


def ends(
    plan: str, write: Callable[[nn.Module], None], *, after: bool, hooked: bool, optimizer: Any = None
) -> dict[str, Tensor]:
    """Train while ``write`` changes the parameters before or after each update, in a hook or in the loop.

    Return the parameters, and on rank 0 also the master weights.
    """
    with engine_of(plan, optimizer) as engine:
        if hooked:
            register = engine.optimizer.register_step_post_hook if after else engine.optimizer.register_step_pre_hook
            register(lambda *_: write(engine.module))
        for step in range(3):
            engine.backward(square_loss(engine, rank(), step))
            if not (hooked or after):
                write(engine.module)
            assert engine.step().stepped
            if after and not hooked:
                write(engine.module)
        if after:
            assert all(param.abs().max() <= BOUND for param in whole_weights(engine).values())
        return {**whole_weights(engine), **{f"master {name}": value for name, value in engine.state_dict().items()}}


def keeps_written(plan: str, write: Callable[[nn.Module], None], after: bool, optimizer: Any = None) -> None:
    found, expected = (ends(plan, write, after=after, hooked=hooked, optimizer=optimizer) for hooked in (True, False))
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def ends_with_data(plan: str, hook: str, is_kept: bool) -> dict[str, Tensor]:
    """Train with a hook that changes nothing, and maybe with views through which the user could write."""
    with engine_of(plan) as engine:
        kept = [param.data for param in engine.module.parameters()] if is_kept else []
        if hook:
            getattr(engine.optimizer, f"register_step_{hook}_hook")(lambda *_: None)
        for step in range(3):
            engine.backward(square_loss(engine, rank(), step))
            values_of(engine.module)  # waits for updates in backward
            assert engine.step().stepped
        del kept
        return engine.state_dict()


def takes_no_update_for_a_write(plan: str, hook: str) -> None:
    found, expected = (ends_with_data(plan, hook, is_kept) for is_kept in (True, False))
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


ON_RANKS = sampled(product(PLANS, (1, 2)), *product(PLANS, (2,)), ("stage 2 in bf16", 1), ("in backward", 1))


@pytest.mark.parametrize(("plan", "world"), ON_RANKS)
def test_hooks_find_all_parameters_updated(plan: str, world: int) -> None:
    on_ranks(world, finds_updated, plan)


@pytest.mark.parametrize(("plan", "world"), ON_RANKS)
def test_writes_after_the_step_last(plan: str, world: int) -> None:
    on_ranks(world, keeps_written, plan, clamp, True)


@matrix(plan=PLANS, world=[1, 2])
def test_writes_through_data_after_the_step_last(plan: str, world: int) -> None:
    on_ranks(world, keeps_written, plan, clamp_data, True)


@matrix(plan=INLINE, write=[clamp, clamp_data])
def test_writes_before_the_step_last(plan: str, write: Any) -> None:
    on_ranks(2, keeps_written, plan, write, False)


@pytest.mark.parametrize("plan", ["stage 1", "stage 3 in bf16"])
def test_hooks_of_an_optimizer_of_full_parameters(plan: str) -> None:
    on_ranks(2, finds_updated, plan, torch.optim.Adafactor)
    on_ranks(2, keeps_written, plan, clamp, True, torch.optim.Adafactor)


@pytest.mark.parametrize(("plan", "hook"), [("split", "pre"), ("split", "post"), ("split, in backward", "")])
def test_updates_are_no_writes(plan: str, hook: str) -> None:
    on_ranks(2, takes_no_update_for_a_write, plan, hook)
