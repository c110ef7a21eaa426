"""Ranks that run different modules: the gradients are right, or an error names the modules within seconds."""

import re
import time
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import ConfigError, PartitaError
from partita.sharding import runtime, unshard_order
from tests.kit.models import Block, Stack, inputs, square_loss
from tests.kit.plans import ZERO, matrix, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, check, rank, train_recipe, world

# The unshard-order checks: over gloo, and over NCCL.
WAYS = ("ComparedLogs", "RepeatedOrder")
WHOLE = {name: ZERO[name] for name in ("0", "1", "2")}


class Chosen(Stack):
    """Runs the given blocks, in the given order."""

    def forward(self, x: Tensor, blocks: list[int]) -> Tensor:
        x = self.first(x)
        for number in blocks:
            x = self.blocks[number](x)
        return self.last(x)


def skips_on_rank_1(model: Any, rank: int, step: int) -> Tensor:
    blocks = [0, 1, 2, 3, 4] if rank != 1 or step == 0 else [0, 1, 3, 4]
    return model(inputs(rank, step), blocks).square().mean()


def skips_others_each_step(model: Any, rank: int, step: int) -> Tensor:
    blocks = [number for number in range(5) if (number + rank + step) % 3]
    return model(inputs(rank, step), blocks).square().mean()


def another_order_on_each_rank(model: Any, rank: int, step: int) -> Tensor:
    blocks = [0, 1, 2, 3, 4] if rank % 2 else [4, 2, 3, 0, 1]
    return model(inputs(rank, step), blocks).square().mean()


def nothing_on_rank_1(model: Any, rank: int, step: int) -> Tensor | None:
    return None if rank == 1 and step == 1 else model(inputs(rank, step), [0, 1, 2, 3, 4]).square().mean()


def calls_twice_on_rank_1(model: Any, rank: int, step: int) -> Tensor:
    blocks = [0, 1, 2, 2, 3, 4] if rank == 1 else [0, 1, 2, 3, 4]
    return model(inputs(rank, step), blocks).square().mean()


class Branches(nn.Module):
    """Runs all branches on every rank, but detaches the given ones, so that they have no backward."""

    def __init__(self, num_branches: int = 7) -> None:
        super().__init__()
        self.branches = nn.ModuleList([Block() for _ in range(num_branches)])

    def forward(self, x: Tensor, detached: list[int]) -> Tensor:
        for number, branch in enumerate(self.branches):
            added = branch(x)
            x = x + (added.detach() if number in detached else added)
        return x


def detached_on_rank_1(model: Any, rank: int, step: int) -> Tensor:
    detached = [4] if rank == 1 and step else []
    return model(inputs(rank, step).requires_grad_(), detached).square().mean()


def unused_everywhere(model: Any, rank: int, step: int) -> Tensor:
    """Compute a loss that uses blocks 2 and 3 on no rank in step 1, so that they get no gradient, decay or update."""
    return model(inputs(rank, step), [0, 1, 4] if step == 1 else [0, 1, 2, 3, 4]).square().mean()


RECIPES = {
    "skips on rank 1": Recipe(Chosen, skips_on_rank_1),
    "skips others each step": Recipe(Chosen, skips_others_each_step),
    "another order on each rank": Recipe(Chosen, another_order_on_each_rank),
    "calls twice on rank 1": Recipe(Chosen, calls_twice_on_rank_1),
}


def run_whole(name: str) -> None:
    check(RECIPES[name], WHOLE)


def run_everywhere(recipe: Recipe) -> None:
    check(recipe)


def unused_in_a_step() -> None:
    check(Recipe(Chosen, unused_everywhere))


def detached_branch() -> None:
    """Check that ranks with different backwards call the same reductions, if nothing is gathered in backward."""
    check(Recipe(Branches, detached_on_rank_1), {**WHOLE, "3-kept": ZERO["3-kept"]})


def agreeing(way: str) -> Any:
    """Return a context in which engines use the given unshard-order check."""
    return mock.patch.object(runtime, "agree", getattr(unshard_order, way))


def detached_sharded_branch(way: str) -> None:
    with agreeing(way):
        train_recipe(Recipe(Branches, detached_on_rank_1), ZERO["3"])


def without_a_loss() -> None:
    """Check that a rank without a loss in a step contributes zero gradients."""
    check(Recipe(Chosen, nothing_on_rank_1), WHOLE)


def unit_skipped(way: str) -> None:
    with agreeing(way):
        train_recipe(Recipe(Chosen, skips_on_rank_1), ZERO["3"])


def unit_skipped_at_once(way: str) -> None:
    with agreeing(way):
        train_recipe(Recipe(Chosen, skips_others_each_step), ZERO["3"])


def one_rank_steps(way: str) -> None:
    with agreeing(way), partita.initialize(Stack(), {"zero": {"stage": 3}}) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        if rank():
            engine.step()
        else:
            engine(inputs(0, 1))


def one_rank_asks() -> None:
    """Call different methods of the engine on the two ranks."""
    with partita.initialize(Stack(), {"zero": {"stage": 3}}) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        if rank():
            engine.mean(1.5)
        else:
            engine.step()


def other_engine_first(way: str) -> None:
    """Use two engines on one mesh, in another order on rank 1."""
    with agreeing(way), partita.initialize(Stack(1), {"zero": {"stage": 3}}) as one:
        other = partita.initialize(nn.Sequential(Block(), Block()), {"zero": {"stage": 3}}, mesh=one.mesh)
        for engine in (other, one) if rank() else (one, other):
            engine(inputs(rank(), 0))


def set_otherwise(by_rank: list[dict[str, Any]]) -> None:
    partita.initialize(Stack(1), {"communication": {"timeout_s": 20.0}, **by_rank[rank()]})


def with_optimizers(rates: list[float]) -> None:
    model = Stack(1)
    partita.initialize(model, optimizer=torch.optim.SGD(model.parameters(), rates[rank()]))


def where_folders_are(folder: str) -> None:
    settings = {"zero": {"offload": {"path": f"{folder}/{rank()}"}}, "communication": {"timeout_s": 20.0 + rank()}}
    with partita.initialize(Stack(1), settings) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        engine.step()


class Late(nn.Module):
    """Delays one rank after the other, in forward and in backward, for longer than ``PATIENCE_S``."""

    turn = 0

    def forward(self, x: Tensor) -> Tensor:
        Late.turn += 1
        if Late.turn % world() == rank():
            self._wait()
        elif x.requires_grad and (Late.turn + 1) % world() == rank():
            x = x * 1.0
            x.register_hook(self._wait)
        return x

    def _wait(self, grad: Tensor | None = None) -> None:
        time.sleep(4 * unshard_order.PATIENCE_S)


class SometimesLate(Stack):
    def __init__(self) -> None:
        super().__init__(4)
        self.late = nn.ModuleList([Late() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block, late in zip(self.blocks, self.late, strict=True):
            x = late(block(x))
        return self.last(x)


def evaluated_between(model: Any, rank: int, step: int) -> Tensor:
    """Return the square loss, after an evaluation and collectives of the engine."""
    with torch.no_grad():
        value = model(inputs(rank, step + 50)).mean()
    if isinstance(model, partita.Engine):
        assert model.mean(value).isfinite()
        assert model.each(rank) == list(range(world()))
    return square_loss(model, rank, step)


def late_ranks(plans: tuple[str, ...]) -> None:
    """Check that ranks that are late train as usual."""
    with mock.patch.object(unshard_order, "PATIENCE_S", 0.01):
        check(Recipe(SometimesLate, evaluated_between), {plan: ZERO[plan] for plan in ("0", *plans)})


def differs_while_another_is_late() -> None:
    """Skip a unit on rank 1 while the last rank is late, so that the error must wait for it to name all ranks."""
    with mock.patch.object(unshard_order, "PATIENCE_S", 0.3):
        model = Chosen()
        if rank() == world() - 1:
            model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(0.2))
        with partita.initialize(model, {"zero": {"stage": 3}}) as engine:
            engine(inputs(rank(), 0), [0, 2, 3] if rank() == 1 else [0, 1, 2, 3])
            engine(inputs(rank(), 1), [4])


@matrix(name=RECIPES, world=[2, 4])
def test_whole_parameters_have_right_gradients(name: str, world: int) -> None:
    on_ranks(world, run_whole, name)


def test_parameters_unused_in_a_step_are_left_alone() -> None:
    on_ranks(2, unused_in_a_step)


@pytest.mark.parametrize("world", sampled([2, 4], 2))
def test_a_branch_without_gradient_on_one_rank(world: int) -> None:
    on_ranks(world, detached_branch)


@pytest.mark.parametrize("way", WAYS)
def test_a_branch_without_backward_on_one_rank_is_named(way: str) -> None:
    with pytest.raises(PartitaError, match=r"rank 0 gathers 'branches.\d'; rank 1 gathers 'branches.\d'"):
        on_ranks(2, detached_sharded_branch, way, timeout=30)


def test_a_rank_without_a_loss() -> None:
    on_ranks(2, without_a_loss)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_sharded_unit_skipped_on_a_rank_is_named(world: int, way: str) -> None:
    with pytest.raises(PartitaError, match="the ranks run different modules") as raised:
        on_ranks(world, unit_skipped, way, timeout=20)
    message = str(raised.value)
    assert "rank 0 gathers 'blocks." in message
    assert "rank 1 " in message
    assert "zero.units" in message


@pytest.mark.parametrize("way", WAYS)
def test_units_that_differ_from_the_first_step_are_named(way: str) -> None:
    with pytest.raises(PartitaError, match=r"rank 0 gathers 'blocks.1'; rank 1 gathers 'blocks.0'"):
        on_ranks(2, unit_skipped_at_once, way, timeout=20)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_steps_while_another_runs_forward_is_named(way: str) -> None:
    with pytest.raises(PartitaError, match=r"rank 0 gathers '.*'; rank 1 is at engine.step\(\)"):
        on_ranks(2, one_rank_steps, way, timeout=20)


@pytest.mark.parametrize("way", WAYS)
def test_engines_in_another_order_are_named(way: str) -> None:
    with pytest.raises(PartitaError, match=r"rank 0 gathers 'Stack \(root\)'; rank 1 gathers '0'"):
        on_ranks(2, other_engine_first, way, timeout=20)


def test_a_rank_that_calls_something_else_is_told() -> None:
    with pytest.raises(PartitaError, match="rank 0 is at engine.step; rank 1 is at a number of every rank"):
        on_ranks(2, one_rank_asks, timeout=20)


TWO_EACH = (("1", "3"), ("2", "3-kept"))


@pytest.mark.parametrize(("world", "plans"), sampled(product((2, 4), TWO_EACH), (2, TWO_EACH[0])))
def test_late_ranks_are_waited_for(world: int, plans: tuple[str, ...]) -> None:
    on_ranks(world, late_ranks, plans)


def test_a_difference_is_told_of_all_ranks() -> None:
    with pytest.raises(PartitaError, match="rank 0 gathers 'blocks.1'; rank 1 gathers 'blocks.2'; .*; rank 3 gathers"):
        on_ranks(4, differs_while_another_is_late, timeout=20)


DIFFERENT = {
    "clip": ([{"clip_grad_norm": 1.0}, {}], "clip_grad_norm is 1.0 on rank 0 and null on rank 1"),
    "optimizer": ([{}, {"optimizer": {"name": "sgd"}}], "optimizer.name is 'adamw' on rank 0 and 'sgd' on rank 1"),
    "accumulate": ([{}, {"batch": {"accumulate": 2}}], "batch.accumulate is 'auto' on rank 0 and 2 on rank 1"),
    "stage": ([{"zero": {"stage": 3}}, {}], "zero.stage is 3 on rank 0 and 1 on rank 1"),
    "hierarchical": (
        [{"zero": {"stage": 3}}, {"zero": {"stage": 3, "hierarchical": True}}],
        "zero.hierarchical is false on rank 0 and true on rank 1",
    ),
    "within_node": (
        [{}, {"communication": {"within_node": "network", "timeout_s": 20.0}}],
        "communication.within_node is 'auto' on rank 0 and 'network' on rank 1",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_settings_differ(name: str) -> None:
    by_rank, said = DIFFERENT[name]
    with pytest.raises(ConfigError, match=re.escape(said)):
        on_ranks(2, set_otherwise, by_rank)


def test_passed_optimizers_differ() -> None:
    with pytest.raises(ConfigError, match=re.escape("param_groups[0]['lr'] of the optimizer is 0.1 on rank 0 and 0.2")):
        on_ranks(2, with_optimizers, [0.1, 0.2])


def test_folders_may_differ(tmp_path: Path) -> None:
    on_ranks(2, where_folders_are, str(tmp_path))
