"""States that are sharded over the ranks of a node, and replicated on every node."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import partita
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, Trained, assert_same_bits, rank, train_recipe, whole_weights
from tests.sharding.test_visits import siamese

REPLICATED = {"stage": 3, "replicate": "nodes"}
LEAN = {"compute": "bf16", "master": "split", "moments": "int8", "gradients": "in_backward"}
OFFLOAD = {"parameters": "host", "optimizer": "host"}


def on_nodes(ranks_per_node: int) -> Any:
    local = {"LOCAL_WORLD_SIZE": str(ranks_per_node), "LOCAL_RANK": str(rank() % ranks_per_node)}
    return mock.patch.dict(os.environ, local)


def assert_near(one: Trained, other: Trained) -> None:
    """Assert that two runs are equal up to rounding of sums in another order."""
    torch.testing.assert_close(one.losses, other.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.norms, other.norms, rtol=1e-5, atol=1e-6)
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, other.weights[name], rtol=1e-4, atol=1e-5)


def trained_as_at_stage_3(config: dict[str, Any], loss: Callable[..., Tensor] = square_loss) -> None:
    recipe = Recipe(lambda: Stack(2), loss, config=config, num_steps=4, plain=False)
    with on_nodes(2):
        assert_near(train_recipe(recipe, REPLICATED), train_recipe(recipe, ZERO["3"]))


def on_one_node() -> None:
    recipe = Recipe(lambda: Stack(2), plain=False)
    with on_nodes(4):
        assert_same_bits(train_recipe(recipe, REPLICATED), train_recipe(recipe, ZERO["3"]), "on one node")


def the_same_on_every_node(config: dict[str, Any]) -> None:
    """Check that replicas stay equal bit for bit, whatever is rounded."""
    with on_nodes(2), partita.initialize(Stack(2), {"zero": REPLICATED, **config}) as engine:
        for step in range(3):
            engine.backward(square_loss(engine, rank(), step).float())
            engine.step()
        engine.memory_report()  # waits for running updates
        states = [segment.stored.load() for unit in engine._parts.runtime.units for segment in unit.segments]
        mine = torch.cat([state.float().view(-1) for state in states])
        every = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(every, mine)
        assert all(torch.equal(every[index], every[index + 2]) for index in range(2))
        assert not torch.equal(every[0], every[1])


def looked_at() -> None:
    """Check that inspected gradients and optimizer states are those of stage 3: each replica counts once."""
    found = []
    for zero in (REPLICATED, ZERO["3"]):
        seeds.start()
        with on_nodes(2), partita.initialize(Stack(2), {"zero": zero, "batch": {"accumulate": 2}}) as engine:
            for step in range(2):
                engine.backward(square_loss(engine, rank(), step))
                gradient = engine.gradient("blocks.1.up.weight")
                with engine.no_sync():
                    engine.backward(square_loss(engine, rank(), 10 + step))
                more = engine.gradient("blocks.1.up.weight")
                engine.step()
            state = engine.optimizer_state("blocks.1.up.weight")
            found.append([gradient, more, *(state[key] for key in ("step", "exp_avg", "exp_avg_sq"))])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def saved(folder: Path, zero: dict[str, Any], ranks_per_node: int) -> list[float]:
    """Train two steps, save a checkpoint, and return the losses of two more steps."""
    seeds.start()
    with on_nodes(ranks_per_node), partita.initialize(Stack(2), {"zero": zero}) as engine:
        take_steps(engine, 0)
        engine.save(folder)
        engine.wait_for_checkpoint()
        return take_steps(engine, 2)


def resumed(folder: Path, zero: dict[str, Any], ranks_per_node: int) -> list[float]:
    torch.manual_seed(1)
    with on_nodes(ranks_per_node), partita.initialize(Stack(2), {"zero": zero}) as engine:
        assert engine.load(folder).step == 2
        return take_steps(engine, 2)


def take_steps(engine: partita.Engine, first: int) -> list[float]:
    """Train two steps on the same samples on every rank, so that results do not depend on the world size."""
    losses = []
    for step in (first, first + 1):
        loss = square_loss(engine, 0, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def saves_itself(folder: Path) -> None:
    with on_nodes(2), partita.initialize(Stack(2), {"zero": REPLICATED}) as engine:
        take_steps(engine, 0)
        expected = whole_weights(engine)
        engine.export(folder)
        engine.close(whole=True)
        assert all(torch.equal(value, expected[name]) for name, value in engine.module.named_parameters())
    with on_nodes(2), partita.initialize(Stack(2), {"zero": REPLICATED}, weights=folder) as engine:
        assert all(torch.equal(value, expected[name]) for name, value in whole_weights(engine).items())


@pytest.mark.parametrize(
    "config",
    [
        {"batch": {"accumulate": 2}, "clip_grad_norm": 0.05},
        {"batch": {"accumulate": 2}, "zero": {"offload": OFFLOAD}},
        {"precision": {"gradients": "in_backward"}},
    ],
)
def test_trained_as_at_stage_3(config: dict[str, Any]) -> None:
    on_ranks(4, trained_as_at_stage_3, config)


def test_a_model_that_is_called_twice() -> None:
    on_ranks(4, trained_as_at_stage_3, {}, siamese)


def test_on_one_node_it_is_stage_3() -> None:
    on_ranks(4, on_one_node)


@pytest.mark.parametrize(
    "precision", [{}, {"compute": "bf16", "gradients": "bf16"}, LEAN], ids=["fp32", "bf16", "lean"]
)
def test_nodes_stay_equal(precision: dict[str, Any]) -> None:
    on_ranks(4, the_same_on_every_node, {"precision": precision})


def test_looking() -> None:
    on_ranks(4, looked_at)


def test_export_weights_and_close(tmp_path: Path) -> None:
    on_ranks(4, saves_itself, tmp_path)


def test_checkpoints(tmp_path: Path) -> None:
    """A resumed run has the same losses: exactly with the same layout, up to rounding with another one."""
    expected = on_ranks(4, saved, tmp_path / "one", REPLICATED, 2)
    assert on_ranks(4, resumed, tmp_path / "one", REPLICATED, 2) == expected
    for world, zero, ranks_per_node in ((4, ZERO["3"], 2), (2, ZERO["1"], 2), (4, REPLICATED, 4)):
        for losses in on_ranks(world, resumed, tmp_path / "one", zero, ranks_per_node):
            torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=1e-7)
    other = on_ranks(2, saved, tmp_path / "other", ZERO["3"], 2)
    for losses in on_ranks(4, resumed, tmp_path / "other", REPLICATED, 2):
        torch.testing.assert_close(losses, other[0], rtol=1e-5, atol=1e-7)
