"""Clipping by hand: one call works at every stage; reads and changes of p.grad are refused."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita import PartitaError
from tests.kit import seeds
from tests.kit.models import Stack, inputs, square_loss
from tests.kit.plans import ZERO, matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights, world

CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"precision": {"compute": "fp16", "loss_scale": 8.0}},
    "accumulated": {"batch": {"accumulate": 2}},
    "offloaded": {"zero": {"stage": 2, "offload": {"optimizer": "host"}}},
}


def trained(config: Mapping[str, Any], by_hand: bool) -> tuple[list[float | None], list[Tensor], dict[str, Tensor]]:
    seeds.start()
    norms, gradients = list[float | None](), list[Tensor]()
    with partita.initialize(Stack(2), {**config, **({} if by_hand else {"clip_grad_norm": 0.05})}) as engine:
        for step in range(4):
            engine.backward(square_loss(engine, rank(), step))
            norm = None
            if by_hand and (step % 2 or not config.get("batch")):
                norm = engine.clip_grad_norm(0.5)
                assert engine.clip_grad_norm(0.05) == norm
            gradient = engine.gradient("first.weight")
            assert gradient is not None
            gradients.append(gradient)
            result = engine.step()
            assert norm in (None, result.grad_norm)
            norms.append(result.grad_norm)
        return norms, gradients, whole_weights(engine)


def by_hand(config: Mapping[str, Any]) -> None:
    for zero in [config["zero"]] if "zero" in config else ZERO.values():
        one, other = (trained({**config, "zero": zero}, by_hand) for by_hand in (False, True))
        assert one[0] == other[0]
        for mine, theirs in zip(one[1], other[1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
        assert all(torch.equal(value, other[2][name]) for name, value in one[2].items())


def once() -> None:
    """Check that clipping by hand applies to one step only, and is dropped with its batch."""
    with partita.initialize(Stack(1), {"optimizer": {"name": "sgd", "lr": 1.0, "weight_decay": 0.0}}) as engine:

        def moved(*, clip: bool, drop: bool = False) -> float:
            before = whole_weights(engine)["last.bias"]
            engine.backward(square_loss(engine, rank(), 0))
            if clip:
                engine.clip_grad_norm(1e-6)
            if drop:
                engine.zero_grad()
                engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            return (whole_weights(engine)["last.bias"] - before).norm().item()

        assert moved(clip=True) < 1e-5
        assert moved(clip=False) > 1e-3
        assert moved(clip=True, drop=True) > 1e-3


def refused() -> None:
    with partita.initialize(Stack(1), {"batch": {"accumulate": 2}}) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        with pytest.raises(PartitaError, match="in micro-batch 1 of 2: gradients are clipped after the last one"):
            engine.clip_grad_norm(1.0)
        engine.step()
        engine.backward(square_loss(engine, rank(), 1))
        with pytest.raises(PartitaError, match=r"expected a positive norm, got 0\.0"):
            engine.clip_grad_norm(0.0)
        engine.clip_grad_norm(1.0)
        with pytest.raises(PartitaError, match=r"a backward between engine.clip_grad_norm\(\) and engine.step\(\)"):
            engine.backward(square_loss(engine, rank(), 2))
    with partita.initialize(Stack(1), {"precision": {"gradients": "in_backward"}}) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        with pytest.raises(PartitaError, match="clip_grad_norm: with precision.gradients: in_backward"):
            engine.clip_grad_norm(1.0)
        engine.step()


def _clip(engine: partita.Engine) -> None:
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)


def _scale(engine: partita.Engine) -> None:
    for param in engine.module.parameters():
        if param.grad is not None:
            param.grad *= 0.5


def by_the_user(change: Callable[[partita.Engine], None], accumulate: int) -> str:
    with partita.initialize(Stack(1), {"batch": {"accumulate": accumulate}}) as engine:
        for step in range(accumulate):
            engine.backward(square_loss(engine, rank(), step))
            if step < accumulate - 1:
                engine.step()
        change(engine)
        with pytest.raises(PartitaError) as raised:
            engine.step()
        engine.zero_grad()
        for step in range(accumulate):
            engine.backward(square_loss(engine, rank(), step))
            result = engine.step()
        assert result.stepped
        return str(raised.value)


LOOKS: list[Callable[[Tensor], object]] = [
    lambda grad: torch.nn.utils.get_total_norm([grad]),
    lambda grad: grad.norm(),
    lambda grad: grad.mul_(2.0),
    lambda grad: grad.clamp_(-1.0, 1.0),
    lambda grad: grad.clone(),
    lambda grad: grad.zero_(),
    lambda grad: torch.zeros_like(grad.detach()).add_(grad),
]


def collected(config: Mapping[str, Any], accumulate: int = 1) -> None:
    """Check that `.grad` is a placeholder from a batch's last backward to its step, and otherwise None.

    The placeholder has no values: they are in a bucket.
    """
    with partita.initialize(Stack(1), {**config, "batch": {"accumulate": accumulate}}) as engine:
        last, params = engine.module.last.weight, list(engine.module.parameters())

        def complete_batch() -> None:
            for micro in range(accumulate):
                assert all(param.grad is None for param in params)
                engine.backward(square_loss(engine, rank(), micro))
                if micro + 1 < accumulate:
                    engine.step()

        for end in (engine.step, engine.zero_grad, engine.step, engine.close):
            complete_batch()
            grad = last.grad
            assert (grad.shape, grad.dtype, grad.device) == (last.shape, last.dtype, last.device)
            assert not grad.is_sparse
            assert "last.weight" in repr(grad) + str(grad)
            for look in LOOKS:
                with pytest.raises(PartitaError, match=r"'last.weight' has no values .* engine.clip_grad_norm\("):
                    look(grad)
            with pytest.raises(PartitaError, match="has no values"):
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            end()
            assert all(param.grad is None for param in params)


def inner_losses(zero: Mapping[str, Any], create_graph: bool) -> dict[str, Tensor]:
    """Train one step with a backward from the output, and then one from an inner activation, which bypasses the output.

    Returns: the gradient of both, and the weights.
    """
    seeds.start()
    with partita.initialize(Stack(1), {"zero": zero, "optimizer": {"name": "sgd", "lr": 0.1}}) as engine:
        kept = list[Tensor]()
        engine.module.blocks[0].register_forward_hook(lambda module, args, output: kept.append(output))
        output = engine(inputs(rank(), 0))
        output.square().mean().backward(retain_graph=True)
        kept[0].square().mean().backward(create_graph=create_graph)
        gradient = engine.gradient("first.weight")
        assert gradient is not None
        engine.step()
        return {"gradient": gradient.detach(), **whole_weights(engine)}


def all_inner_losses(create_graph: bool) -> None:
    first, *others = (inner_losses(zero, create_graph) for zero in ZERO.values())
    seeds.start()
    model = Stack(1)
    for other in range(world()):
        x = model.first(inputs(other, 0))
        x = model.blocks[0](x)
        ((x.square().mean() + model.last(x).square().mean()) / world()).backward()
    assert model.first.weight.grad is not None
    torch.testing.assert_close(first["gradient"], model.first.weight.grad)
    for other in others:
        torch.testing.assert_close(first, other)


def _step_by_grad_scaler(engine: partita.Engine) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(engine.optimizer)


def loops_of_others(zero: Mapping[str, Any]) -> None:
    """Check that calls of a plain PyTorch loop between backward and step raise errors: they would find no gradients."""
    refused: dict[str, Callable[[partita.Engine], object]] = {
        r"optimizer.step\(\) between backward and engine.step\(\)": lambda engine: engine.optimizer.step(),
        r"optimizer.zero_grad\(\) between .* call engine.zero_grad": lambda engine: engine.optimizer.zero_grad(),
        r"GradScaler.step\(engine.optimizer\) finds no .*leave the GradScaler out": _step_by_grad_scaler,
    }
    model = Stack(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with partita.initialize(model, {"zero": zero}, optimizer=optimizer) as engine:
        optimizer.step()  # allowed: no gradients are pending
        for said, call in refused.items():
            optimizer.zero_grad()
            engine.backward(square_loss(engine, rank(), 0))
            with pytest.raises(PartitaError, match=said):
                call(engine)
            assert engine.step().stepped
        engine.backward(square_loss(engine, rank(), 0))
    optimizer.zero_grad()
    assert "zero_grad" not in vars(optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


@matrix(config=CONFIGS, world=[1, 2])
def test_by_hand_as_by_the_config(config: str, world: int) -> None:
    on_ranks(world, by_hand, CONFIGS[config])


@pytest.mark.parametrize("world", [1, 2])
def test_it_holds_once(world: int) -> None:
    on_ranks(world, once)


@pytest.mark.parametrize("world", [1, 2])
def test_refused_where_it_cannot_hold(world: int) -> None:
    on_ranks(world, refused)


@matrix(change=[_clip, _scale], accumulate=[1, 2])
def test_gradients_that_the_user_changes(change: Any, accumulate: int) -> None:
    (said,) = on_ranks(1, by_the_user, change, accumulate)
    assert re.search(r"the .grad of '(first|last)\.\w+' was changed between backward and step", said)
    assert "engine.clip_grad_norm(max_norm)" in said


@matrix(plan=ZERO, accumulate=[1, 2])
def test_gradients_that_were_collected(plan: str, accumulate: int) -> None:
    on_ranks(2, collected, {"zero": ZERO[plan]}, accumulate)


@pytest.mark.parametrize("precision", [{"compute": "bf16"}, {"gradients": "in_backward"}], ids=["bf16", "in_backward"])
def test_gradients_that_were_collected_on_one_rank(precision: dict[str, Any]) -> None:
    on_ranks(1, collected, {"precision": precision})


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@matrix(world=[1, 2], create_graph=[False, True])
def test_a_backward_after_they_were_collected(world: int, create_graph: bool) -> None:
    on_ranks(world, all_inner_losses, create_graph)


@matrix(plan=ZERO, world=[1, 2])
def test_calls_that_would_find_no_gradients(plan: str, world: int) -> None:
    on_ranks(world, loops_of_others, ZERO[plan])
