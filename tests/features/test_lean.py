"""Lean states: split masters equal fp32 masters bit by bit, and 8-bit moments have equal values on every tier."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import ConfigError
from partita.layout.state_bytes import model_state_bytes
from partita.memory.ledger import STATES
from partita.memory.tiers import Lease, StateMemory
from partita.optim.fused import FusedAdam, FusedLion, FusedSGD
from tests.kit import seeds
from tests.kit.models import WIDTH, Stack, inputs, square_loss
from tests.kit.plans import ON_DISK, ON_HOST, ZERO, matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, Trained, assert_same_bits, rank, train_recipe, whole_weights

BF16 = {"compute": "bf16", "gradients": "bf16"}
OFFLOADS: tuple[dict[str, str], ...] = ({}, {"optimizer": "host"}, {"optimizer": "disk"}, ON_HOST, ON_DISK)


def trained(precision: dict[str, str], zero: dict[str, Any], offload: dict[str, str], **sections: Any) -> Trained:
    config = {"precision": precision, "clip_grad_norm": 0.5, **sections}
    return train_recipe(Recipe(Stack, config=config, plain=False), {**zero, "offload": offload})


def split_is_fp32(stage: str, offload: dict[str, str], moments: str) -> None:
    expected = trained({**BF16, "moments": moments}, ZERO["0"], {})
    for master in ("fp32", "split"):
        lean = trained({**BF16, "master": master, "moments": moments}, ZERO[stage], offload)
        assert_same_bits(lean, expected, f"{master} master, {moments} moments, stage {stage}, {offload}")


@matrix(offload=OFFLOADS, stage=["1", "3", "3-kept"], moments=["fp32", "int8"], world=[1, 2])
def test_a_split_master_is_an_fp32_master(world: int, moments: str, stage: str, offload: dict[str, str]) -> None:
    on_ranks(world, split_is_fp32, stage, offload, moments)


def int8_everywhere() -> None:
    expected = trained({"moments": "int8"}, ZERO["0"], {})
    exact = trained({}, ZERO["0"], {})
    for stage in ("1", "3"):
        for offload in ({}, ON_HOST, ON_DISK):
            assert_same_bits(
                trained({"moments": "int8"}, ZERO[stage], offload), expected, f"int8, stage {stage}, {offload}"
            )
    assert expected.losses != exact.losses
    torch.testing.assert_close(expected.losses, exact.losses, rtol=0.05, atol=0)


def test_8_bit_moments_of_fp32_weights() -> None:
    on_ranks(2, int8_everywhere)


OTHERS = {
    FusedSGD: {"name": "sgd", "momentum": 0.9, "lr": 0.1},
    FusedLion: {"name": "lion", "lr": 1e-3},
    FusedAdam: {"name": "adam", "lr": 1e-2, "weight_decay": 0.1},
}


def every_optimizer() -> None:
    for optimizer in OTHERS.values():
        expected = trained(BF16, ZERO["0"], {}, optimizer=optimizer)
        assert len(set(expected.losses)) == len(expected.losses)
        for precision in (BF16, {**BF16, "master": "split"}):
            assert_same_bits(
                trained(precision, ZERO["3"], ON_DISK, optimizer=optimizer), expected, f"{optimizer} {precision}"
            )


def test_every_optimizer_of_the_config() -> None:
    on_ranks(2, every_optimizer)


# ----------------------------------------------------------------------------------------- parameters without an update


class TwoLayers(nn.Module):
    """A block of two layers; the second one is used in even steps."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = x + self.text(x)
        return x + self.image(x) if step % 2 == 0 else x


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TwoLayers() for _ in range(3)])

    def forward(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = block(x, step)
        return x


def loss_of_branches(model: Any, rank: int, step: int) -> Tensor:
    return model(inputs(rank, step), step).square().mean()


SKIPPING = Recipe(TwoBranches, loss_of_branches, config={"optimizer": {"lr": 1e-2}}, plain=False)


def ones_in_scratch_memory() -> Any:
    """Fill the memory that updates write 16-bit parameters to, whose content is undefined, with ones."""
    scratch = StateMemory.scratch

    def filled(*args: Any) -> Lease:
        lease = scratch(*args)
        lease.tensor.fill_(1)
        return lease

    return mock.patch.object(StateMemory, "scratch", filled)


def skipped_layers_keep_their_weights(stages: list[str], offload: dict[str, str], precision: dict[str, Any]) -> None:
    recipe = replace(SKIPPING, config={**SKIPPING.config, "precision": precision})
    expected = train_recipe(recipe, ZERO["0"])
    for stage in stages:
        with ones_in_scratch_memory():
            found = train_recipe(recipe, {**ZERO[stage], "offload": offload})
        assert_same_bits(found, expected, f"stage {stage}, {offload}, {precision}")


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_layers_that_a_step_skips_keep_their_weights(compute: str, offload: dict[str, str]) -> None:
    precision = {"compute": compute, **({"loss_scale": 8.0} if compute == "fp16" else {})}
    on_ranks(2, skipped_layers_keep_their_weights, ["1", "2", "3"], offload, precision)


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_layers_that_a_step_skips_keep_their_weights_in_one_process(master: str) -> None:
    precision = {"compute": "bf16", "master": master}
    on_ranks(1, skipped_layers_keep_their_weights, ["1", "3", "3-kept"], ON_DISK, precision)


def a_parameter_out_of_its_group(offload: dict[str, str]) -> None:
    config = {"precision": {"compute": "bf16"}, "optimizer": {"lr": 1e-2}, "zero": {"stage": 3, "offload": offload}}
    seeds.start()
    with ones_in_scratch_memory(), partita.initialize(Stack(2), config) as engine:
        before = whole_weights(engine)
        engine.optimizer.param_groups[0]["params"].pop()  # the model's last parameter
        for step in range(2):
            engine.backward(square_loss(engine, rank(), step))
            assert engine.step().stepped
            after = whole_weights(engine)
            assert [name for name, value in after.items() if torch.equal(value, before[name])] == ["last.bias"]


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_parameter_that_is_removed_from_its_group_keeps_its_weights(offload: dict[str, str]) -> None:
    on_ranks(1, a_parameter_out_of_its_group, offload)


# ------------------------------------------------------------------------------------------------------ reading states


def what_is_read(master: str) -> dict[str, Tensor]:
    seeds.start()
    precision = {**BF16, "master": master, "moments": "int8"}
    with partita.initialize(Stack(2), {"precision": precision, "zero": {"stage": 3, "offload": ON_DISK}}) as engine:
        for step in range(3):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
        last = engine.module.get_parameter("last.weight")
        with engine.gathered(last, modify=True):
            last.data.fill_(0.5)
        state = engine.optimizer_state("blocks.1.up.weight")
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (32, 16)
        assert state["exp_avg"].dtype == torch.float32
        assert state["exp_avg_sq"].min() >= 0
        assert state["step"] == 3
        weights = whole_weights(engine)
        whole = engine.state_dict() if rank() == 0 else (engine.state_dict(), {})[1]
        if rank() == 0:
            assert whole["first.weight"].dtype == torch.float32
            nearest = (whole["first.weight"].view(torch.int32) + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)
            assert torch.equal(nearest, weights["first.weight"])
            assert not torch.equal(whole["first.weight"], weights["first.weight"].float())
            assert torch.equal(whole["last.weight"], torch.full((16, 16), 0.5))
        return {**whole, **weights, **{f"state {key}": value for key, value in state.items()}}


def both_masters_read_alike() -> None:
    one, other = what_is_read("fp32"), what_is_read("split")
    assert one.keys() == other.keys()
    assert [key for key, value in one.items() if not torch.equal(value, other[key])] == []


def test_what_is_read_of_lean_states() -> None:
    on_ranks(2, both_masters_read_alike)


def bytes_of(offload: dict[str, str]) -> dict[tuple[str, str], int]:
    precision = {**BF16, "master": "split", "moments": "int8"}
    with partita.initialize(Stack(3), {"precision": precision, "zero": {"stage": 3, "offload": offload}}) as engine:
        for step in range(2):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
        engine.backward(square_loss(engine, rank(), 2))
        held = engine.memory_report().held
        states = {key: num for key, num in held.items() if key[0] in STATES}
        assert states == model_state_bytes(engine.units, rank())
        return states


def test_bytes_of_lean_states() -> None:
    for offload in ({}, ON_HOST, ON_DISK):
        for of_rank in on_ranks(2, bytes_of, offload):
            by_state = {state: num for (state, _), num in of_rank.items()}
            assert by_state["master"] == by_state["parameters"] == by_state["gradients"]
            assert 0 < by_state["moments"] <= 1.05 * by_state["parameters"]


def test_only_the_configs_optimizer_has_lean_states() -> None:
    def build(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params)

    for precision in ({"master": "split", "compute": "bf16"}, {"moments": "int8"}):
        with pytest.raises(ConfigError, match=r"precision\.(master|moments): \w+ needs the config's optimizer"):
            partita.initialize(nn.Linear(2, 2), {"precision": precision}, optimizer=build)


def test_a_split_master_of_fp32_parameters_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "partita"):
        partita.initialize(nn.Linear(2, 2), {"precision": {"master": "split"}}).close()
    assert "ignored: precision.master (fp32 parameters are their own master weights)" in caplog.text
