"""Frozen parameters cost no gradient, master or optimizer memory; they may be unfrozen and frozen again at any step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from tests.kit import seeds
from tests.kit.models import WIDTH, Stack, inputs, square_loss
from tests.kit.plans import ZERO, matrix, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, check, module_of, rank
from tests.sharding.test_visits import freeze, inference_first, only_norms

QUANTUM = 256


def thaw_block(module: Any, step: int) -> None:
    if step == 1:
        module.blocks[2].requires_grad_(True)


def thaw_one_bias(module: Any, step: int) -> None:
    if step == 1:
        module.blocks[3].up.bias.requires_grad_(True)


def thaw_and_freeze(module: Any, step: int) -> None:
    module.blocks[2].requires_grad_(step in (1, 3))


def freeze_some(module: Any, step: int) -> None:
    if step == 1:
        module.blocks[1].requires_grad_(False)
        module.first.requires_grad_(False)


def one_frozen() -> nn.Module:
    return freeze(Stack(), lambda name: not name.startswith("blocks.2."))


def all_but_head_frozen() -> nn.Module:
    return freeze(Stack(), lambda name: name.startswith("last"))


class WithLoss(Stack):
    """A model whose loss is a method: training never calls its own forward."""

    def loss(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def head_frozen() -> nn.Module:
    return freeze(WithLoss(), lambda name: not name.startswith(("last", "blocks.1.")))


def thaw_head(module: Any, step: int) -> None:
    if step == 1:
        module.requires_grad_(True)


def loss_of_method(model: Any, rank: int, step: int) -> Tensor:
    return module_of(model).loss(inputs(rank, step))


RECIPES = {
    "unfreeze a block": Recipe(one_frozen, before_step=thaw_block, num_steps=4),
    "unfreeze one bias": Recipe(only_norms, before_step=thaw_one_bias, num_steps=4),
    "unfreeze and freeze": Recipe(one_frozen, before_step=thaw_and_freeze, num_steps=5),
    "freeze": Recipe(Stack, before_step=freeze_some, num_steps=4),
    "only the head trains": Recipe(all_but_head_frozen),
    "unfreeze, inference mode first": Recipe(one_frozen, inference_first, before_step=thaw_block, num_steps=4),
}


def run_recipe(name: str) -> None:
    check(RECIPES[name])


def trains_without_a_forward() -> None:
    check(Recipe(head_frozen, loss_of_method, before_step=thaw_head, num_steps=4))


def run_bf16(name: str) -> None:
    check(replace(RECIPES[name], config={"precision": {"compute": "bf16"}}, plain=False))


class LowRank(nn.Module):
    """A frozen layer with a trained low-rank update (LoRA: Hu et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64)
        self.down = nn.Linear(64, 4, bias=False)
        self.up = nn.Linear(4, 64, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LowRank() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, 64 // WIDTH)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def adapted_bytes(frozen_values: str) -> None:
    """Check that only the adapters (2 x 256 elements per layer) have gradients and moments.

    Frozen layers have fp32 values in addition to the 16-bit ones, unless ``frozen_values`` is "compute".
    """
    trained = 4 * 2 * 256
    for name, zero in ZERO.items():
        split = 2 if zero["stage"] else 1
        grads_split = 2 if zero["stage"] >= 2 else 1
        config = {"zero": zero, "precision": {"compute": "bf16", "frozen": frozen_values}}
        with partita.initialize(Adapted(), config) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            held = engine.memory_report().held
        frozen = 4 * (64 * 64 + 2 * QUANTUM)  # 2 * QUANTUM: the bias, padded to equal shards
        kept = trained + (frozen if frozen_values == "fp32" else 0)
        assert held["master", "device"] == 4 * kept // split, name
        assert held["moments", "device"] == 2 * 4 * trained // split, name
        assert held["gradients", "device"] == 4 * trained // grads_split, name
        assert held["parameters", "device"] == 2 * (trained + frozen) // (2 if zero["stage"] == 3 else 1), name


def adapted() -> None:
    check(Recipe(Adapted))


def state_of_frozen() -> None:
    for zero in ZERO.values():
        with partita.initialize(all_but_head_frozen(), {"zero": zero}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            assert engine.gradient("first.weight") is None
            assert engine.gradient("last.weight") is not None
            engine.step()
            assert engine.optimizer_state("first.weight") == {}
            assert engine.optimizer_state("last.weight").keys() == {"step", "exp_avg", "exp_avg_sq"}
            engine.module.first.requires_grad_(True)
            engine.backward(square_loss(engine, rank(), 1))
            engine.step()
            assert engine.optimizer_state("first.weight")["step"] == 1
            assert engine.optimizer_state("last.weight")["step"] == 2


def nothing_trains() -> None:
    """Check that a frozen model (a teacher) can be evaluated at any stage, and has no gradients or optimizer states."""
    for zero in ZERO.values():
        seeds.start()
        model = Stack().requires_grad_(False)
        expected = model(inputs(0, 0))
        with partita.initialize(model, {"zero": zero}) as engine:
            assert torch.equal(engine(inputs(0, 0)), expected)
            assert set(engine.memory_report().held) <= {("parameters", "device"), ("buffer_pool", "device")}


@matrix(name=RECIPES, world=[1, 2])
def test_freezing_in_between(name: str, world: int) -> None:
    on_ranks(world, run_recipe, name)


def test_unfreezing_without_a_forward_of_the_model() -> None:
    on_ranks(2, trains_without_a_forward)


@pytest.mark.parametrize(
    "name",
    sampled(
        ["unfreeze a block", "unfreeze and freeze", "unfreeze, inference mode first"],
        *("unfreeze and freeze", "unfreeze, inference mode first"),
    ),
)
def test_freezing_in_between_in_half_precision(name: str) -> None:
    on_ranks(2, run_bf16, name)


def test_adapters_cost_their_own_memory_only() -> None:
    for frozen_values in ("fp32", "compute"):
        on_ranks(2, adapted_bytes, frozen_values)
    on_ranks(2, adapted)


def test_states_of_frozen_parameters() -> None:
    on_ranks(2, state_of_frozen)


def test_model_without_trained_parameters() -> None:
    on_ranks(2, nothing_trains)
