"""Tests of autograd graphs that are built inside engine.gathered and run backward after the block."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import partita
from partita.memory import buffer_pool
from tests.kit import seeds
from tests.kit.models import WIDTH, Stack, inputs, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.state import assert_idle
from tests.kit.training import Recipe, assert_same_bits, check, module_of, rank, train_recipe


def gathered(model: Any, *items: Any) -> Any:
    """Return engine.gathered, or a null context for a plain module."""
    return model.gathered(*items) if isinstance(model, partita.Engine) else contextlib.nullcontext()


def decay(model: Any, rank: int, step: int) -> Tensor:
    """Return a loss with an L2 penalty on all parameters, computed after the forward."""
    loss = square_loss(model, rank, step)
    with gathered(model):
        penalty = sum(param.square().sum() for param in module_of(model).parameters())
    return loss + 0.1 * penalty


def orthogonality(model: Any, rank: int, step: int) -> Tensor:
    """Return a loss with an orthogonality penalty on one block, computed before the forward; its graph saves views."""
    block = module_of(model).blocks[1]
    with gathered(model, block):
        penalty = (block.up.weight.t() @ block.up.weight - torch.eye(WIDTH)).square().mean()
        penalty = penalty + (block.down.weight.flatten() * block.down.weight.flatten()).sum()
    return square_loss(model, rank, step) + penalty


def twice(model: Any, rank: int, step: int) -> Tensor:
    """Return a loss with penalties from two nested gathered blocks, and from a third one after the forward."""
    module = module_of(model)
    with gathered(model):
        first = module.first.weight.square().sum()
        with gathered(model, module.first):
            second = module.first.weight.pow(4).sum()
    loss = square_loss(model, rank, step)
    with gathered(model, module.first):
        third = module.first.bias.exp().sum()
    return loss + 0.1 * (first + second + third)


def gradients_apart(model: Any, rank: int, step: int) -> Tensor:
    """Return a loss after autograd.grad of a penalty outside its gathered block; the gradient has the factor 0."""
    param = module_of(model).blocks[0].up.weight
    with gathered(model, param):
        penalty = param.square().sum()
    (gradient,) = torch.autograd.grad(penalty, param)
    return square_loss(model, rank, step) + 0 * gradient.sum()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "decay": decay,
    "orthogonality": orthogonality,
    "twice": twice,
    "gradients apart": gradients_apart,
}
SHARDED = {name: ZERO[name] for name in ("0", "3", "3-kept")}


def kept(engine: partita.Engine) -> int:
    return engine.memory_report().held.get(("gathered", "device"), 0)


def assert_given_back(engine: partita.Engine) -> None:
    assert_idle(engine)
    assert kept(engine) == 0
    assert all(unit.storage.nbytes() == 0 for unit in engine._parts.runtime.units)


def trains(name: str) -> None:
    check(Recipe(Stack, LOSSES[name]), SHARDED)


def trains_with_resized_storages() -> None:
    expected = train_recipe(Recipe(Stack, decay), ZERO["3"])
    with mock.patch.object(buffer_pool, "storage_swap_available", return_value=False):
        assert_same_bits(train_recipe(Recipe(Stack, decay), ZERO["3"]), expected, "resized storages")


def on_one_rank() -> None:
    """A graph that only one rank keeps does not affect the other ranks."""
    seeds.start()
    with partita.initialize(Stack(), {"zero": ZERO["3"]}) as engine:
        logged = []
        for step in range(3):
            loss = square_loss(engine, rank(), step)
            with engine.gathered():
                if rank() == 0:
                    logged.append(sum(param.norm() for param in module_of(engine).parameters()))
            assert (kept(engine) > 0) == (rank() == 0)
            engine.backward(loss)
            engine.step()
            assert_given_back(engine)


def memory_comes_back() -> None:
    with partita.initialize(Stack(), {"zero": ZERO["3"]}) as engine:
        module = module_of(engine)
        for step in range(2):
            loss = decay(engine, rank(), step)
            assert kept(engine) > 0
            assert engine.memory_report().held["gathered", "device"] == sum(
                unit.storage.nbytes() for unit in engine._parts.runtime.units
            )
            engine.backward(loss)
            engine.step()
            del loss
            assert_given_back(engine)
        with engine.gathered():
            norm = module.first.weight.norm().item()
            gone = module.first.weight.square().sum()
            del gone
        assert norm > 0
        assert_given_back(engine)
        with engine.gathered(module.first):
            penalty = module.first.weight.square().sum()
        assert kept(engine) > 0
        del penalty
        with engine.gathered(module.last):
            pass
        assert_given_back(engine)


def stale() -> None:
    """Backward of a graph that was built before an update is an error, as in plain PyTorch."""
    for zero in SHARDED.values():
        with partita.initialize(Stack(), {"zero": zero}) as engine:
            with engine.gathered():
                penalty = module_of(engine).first.weight.pow(2).sum()
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                penalty.backward()


def over_micro_batches() -> None:
    """The backward of a graph can run in a later micro-batch."""
    ends = []
    for zero in SHARDED.values():
        seeds.start()
        with partita.initialize(Stack(), {"zero": zero, "batch": {"accumulate": 2}}) as engine:
            with engine.gathered():
                penalty = sum(param.square().sum() for param in module_of(engine).parameters())
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            engine.backward(square_loss(engine, rank(), 1) + penalty)
            assert engine.step().stepped
            with engine.gathered(), torch.no_grad():
                ends.append([param.clone() for param in module_of(engine).parameters()])
    for end in ends:
        for one, other in zip(end, ends[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def views_stay_readable() -> None:
    """A view that outlives its gathered block stays readable, and keeps its memory until it is freed."""
    with partita.initialize(Stack(), {"zero": ZERO["3"]}) as engine:
        weight = module_of(engine).blocks[1].up.weight
        with engine.gathered():
            expected = weight.detach().clone()
            view = weight.detach().t()
        assert torch.equal(view, expected.t())
        with torch.no_grad():
            engine(inputs(rank(), 0))
        assert torch.equal(view, expected.t())
        engine.backward(square_loss(engine, rank(), 0))
        engine.step()
        assert view.isfinite().all()
        assert kept(engine) > 0
        del view
        engine.backward(square_loss(engine, rank(), 0))
        engine.step()
        assert_given_back(engine)


@pytest.mark.parametrize("name", LOSSES)
def test_trains_as_stage_0_and_as_plain_pytorch(name: str) -> None:
    on_ranks(2, trains, name)


def test_with_resized_storages() -> None:
    on_ranks(2, trains_with_resized_storages)


def test_ranks_may_keep_other_graphs() -> None:
    on_ranks(2, on_one_rank)


def test_memory_is_given_back() -> None:
    on_ranks(2, memory_comes_back)


def test_a_graph_of_before_an_update() -> None:
    on_ranks(2, stale)


def test_a_graph_over_micro_batches() -> None:
    on_ranks(2, over_micro_batches)


def test_views() -> None:
    on_ranks(2, views_stay_readable)
