"""Offloaded states: the same bits as on the device, and no value is read before it is ready."""

import tempfile
import warnings
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import PartitaError
from partita.errors import ConfigError
from partita.layout.state_bytes import model_state_bytes
from partita.memory.disk import Disk
from tests.features import parity
from tests.kit import seeds
from tests.kit.models import Stack, inputs, square_loss
from tests.kit.plans import ON_DISK, ZERO, matrix, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, assert_same_bits, rank, train_recipe, whole_weights
from tests.sharding.test_visits import siamese

OFFLOADS: dict[str, dict[str, str]] = {
    "optimizer on host": {"optimizer": "host"},
    "all on host": {"parameters": "host", "optimizer": "host"},
    "parameters on host": {"parameters": "host"},
    "gradients on host": {"gradients": "host"},
    "optimizer on disk": {"optimizer": "disk"},
    "all on disk": {"parameters": "disk", "optimizer": "disk"},
    "gradients on disk": {"gradients": "disk"},
    "parameters on disk, optimizer on host": {"parameters": "disk", "optimizer": "host"},
    "optimizer on disk, gradients on the device": {"optimizer": "disk", "gradients": "none"},
}
STAGES = ("1", "2", "3")


class Parts(nn.Module):
    """A model with a branch that most steps skip, a frozen layer, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.seldom = Stack(1), Stack(1), Stack(1)
        self.last = nn.Linear(16, 4).requires_grad_(False)

    def forward(self, x: Tensor, seldom: bool) -> Tensor:
        x = self.twice(self.twice(self.first(x)))
        return self.last(self.seldom(x) if seldom else x)


def seldom_loss(model: Any, rank: int, step: int) -> Tensor:
    return model(inputs(rank, step), step == 1).square().mean()


def thaw(model: Any, step: int) -> None:
    if step == 2:
        model.last.requires_grad_(True)


RECIPES = {
    "clipped": Recipe(Stack, config={"clip_grad_norm": 0.5, "schedule": {"warmup_steps": 2}}),
    "two forwards": Recipe(Stack, siamese, plain=False),
    "16 bits": Recipe(Stack, config={"precision": {"compute": "bf16", "gradients": "bf16"}}, plain=False),
    "seldom used, frozen, thawed": Recipe(Parts, seldom_loss, before_step=thaw, plain=False, num_steps=4),
    "momentum": Recipe(Stack, config={"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}, plain=False),
}


def trains_alike(recipe: str, stage: str, offload: str) -> None:
    offloaded = train_recipe(RECIPES[recipe], {**ZERO[stage], "offload": OFFLOADS[offload]})
    assert_same_bits(offloaded, train_recipe(RECIPES[recipe], ZERO[stage]), f"{recipe}, stage {stage}, {offload}")


@matrix(offload=OFFLOADS, stage=STAGES, world=[1, 2])
def test_the_same_bits_wherever_states_rest(world: int, stage: str, offload: str) -> None:
    on_ranks(world, trains_alike, "clipped", stage, offload)


@pytest.mark.parametrize(
    ("stage", "offload"), sampled(product(STAGES, ("all on host", "all on disk")), ("3", "all on disk"))
)
def test_the_same_bits_on_four_ranks(stage: str, offload: str) -> None:
    on_ranks(4, trains_alike, "clipped", stage, offload)


@matrix(
    recipe=[name for name in RECIPES if name != "clipped"],
    stage=("1", "3"),
    offload=("all on host", "all on disk", "optimizer on disk"),
)
def test_the_same_bits_in_every_training(recipe: str, stage: str, offload: str) -> None:
    on_ranks(2, trains_alike, recipe, stage, offload)


def encodes_no_padding(offload: dict[str, str]) -> None:
    """Check int8 codes, of which a parameter's last block has one scale for its values and the padding after them."""
    config = {"precision": {"compute": "bf16"}, "communication": {"parameters": "int8"}}
    recipe = Recipe(Stack, config=config, plain=False)
    offloaded = train_recipe(recipe, {**ZERO["3"], "offload": offload})
    assert_same_bits(offloaded, train_recipe(recipe, ZERO["3"]), str(offload))


@pytest.mark.parametrize("offload", [{"parameters": "disk"}, ON_DISK])
def test_the_same_codes_wherever_states_rest(offload: dict[str, str]) -> None:
    on_ranks(2, encodes_no_padding, offload)


def test_whole_on_every_rank() -> None:
    """Stage 0 with unsharded offloaded states, and stage 3 with ``keep_gathered``, have the bits of stage 0."""
    on_ranks(2, whole_on_every_rank)


def whole_on_every_rank() -> None:
    expected = train_recipe(RECIPES["clipped"], ZERO["0"])
    for stage in ("0", "3-kept"):
        for offload in ({"optimizer": "host"}, ON_DISK):
            assert_same_bits(
                train_recipe(RECIPES["clipped"], {**ZERO[stage], "offload": offload}),
                expected,
                f"stage {stage} {offload}",
            )


@pytest.mark.parametrize("name", sampled(["gpt2", "resnet", "lstm", "mixtral"], "gpt2", "lstm"))
def test_real_models(name: str) -> None:
    verdict = parity.judge(name, 2, ("0", "3-host", "3-disk"))
    assert {key: unequal for key, unequal in verdict.from_stage_0.items() if unequal} == {}


# ------------------------------------------------------------------------------------------------------ visible effects


def accumulated() -> None:
    """Check that gradients of several micro-batches accumulate on their tier, with and without ``no_sync``."""
    ends: list[tuple[list[float], dict[str, Tensor]]] = []
    for offload in ({}, {"optimizer": "host"}, ON_DISK):
        seeds.start()
        with partita.initialize(
            Stack(2), {"zero": {"stage": 2, "offload": offload}, "batch": {"accumulate": 4}}
        ) as engine:
            norms = []
            for turn in range(8):
                if turn % 4 == 1:
                    with engine.no_sync():
                        engine.backward(square_loss(engine, rank(), turn))
                else:
                    engine.backward(square_loss(engine, rank(), turn))
                norms += [engine.step().grad_norm or 0.0]
            ends.append((norms, whole_weights(engine)))
    for norms, weights in ends[1:]:
        assert norms == ends[0][0]
        assert all(torch.equal(weights[name], value) for name, value in ends[0][1].items())


def test_accumulation() -> None:
    on_ranks(2, accumulated)


def read_at_once() -> None:
    """Check that all values read right after a step, while updates still run, are those after the step."""
    seen: list[dict[str, Any]] = []
    for offload in ({}, {"optimizer": "host"}, {"optimizer": "disk"}):
        for stage in (1, 3):
            seeds.start()
            model = Stack(3)
            with partita.initialize(model, {"zero": {"stage": stage, "offload": offload}}) as engine:
                for step in range(3):
                    engine.backward(square_loss(engine, rank(), step))
                    engine.step()
                    for group in engine.optimizer.param_groups:
                        group["lr"] = 100.0 if step == 1 else 0.001  # affects only the next update
                    if stage == 1:
                        plain = {name: p.detach().clone() for name, p in model.named_parameters()}
                    else:
                        plain = whole_weights(engine)
                seen.append(
                    {
                        **plain,
                        **{f"state {k}": v for k, v in engine.optimizer_state("blocks.1.up.weight").items()},
                        **{f"master {k}": v for k, v in engine.state_dict().items()},
                    }
                )
    for other in seen[1:]:
        assert other.keys() == seen[0].keys()
        assert [key for key in other if not torch.equal(other[key], seen[0][key])] == []


def test_what_is_read_at_once_is_up_to_date() -> None:
    on_ranks(2, read_at_once)


def step_hooks_find_it_done() -> None:
    """Check that hooks on the optimizer's step run once per step, after all parameters are updated."""
    calls: list[Tensor] = []
    seeds.start()
    model = Stack(2)
    with partita.initialize(model, {"zero": {"stage": 1, "offload": {"optimizer": "disk"}}}) as engine:
        engine.optimizer.register_step_post_hook(lambda *_: calls.append(model.last.weight.detach().clone()))
        for step in range(2):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
            assert torch.equal(calls[-1], model.last.weight)
    assert len(calls) == 2


def test_hooks_on_the_optimizers_step() -> None:
    on_ranks(2, step_hooks_find_it_done)


def as_the_table_says(stage: int, offload: dict[str, str], compute: str) -> None:
    config = {"zero": {"stage": stage, "offload": offload}, "precision": {"compute": compute}}
    with partita.initialize(Stack(3), config) as engine:
        for step in range(2):
            engine.backward(square_loss(engine, rank(), step))
            if step == 0:
                engine.step()
        planned = model_state_bytes(engine.units, rank())
        held = engine.memory_report().held
        assert {
            key: num for key, num in held.items() if key[0] in ("parameters", "gradients", "master", "moments")
        } == planned


@matrix(offload=OFFLOADS, stage=[1, 3], compute=["fp32", "bf16"], world=[1, 2])
def test_bytes_are_where_the_table_says(offload: str, stage: int, compute: str, world: int) -> None:
    on_ranks(world, as_the_table_says, stage, OFFLOADS[offload], compute)


def goes_on_after_an_exception() -> None:
    with partita.initialize(Stack(3), {"zero": {"stage": 3, "offload": ON_DISK}}) as engine:
        for step in range(4):
            if step == 2:
                hook = engine.module.get_submodule("blocks.1").register_forward_hook(fail)
                with pytest.raises(ArithmeticError):
                    square_loss(engine, rank(), step)
                hook.remove()
            engine.backward(square_loss(engine, rank(), step))
            assert engine.step().stepped


def fail(*_: Any) -> None:
    raise ArithmeticError


def test_an_exception_in_forward() -> None:
    on_ranks(2, goes_on_after_an_exception)


def skips_what_is_not_finite() -> None:
    with partita.initialize(Stack(2), {"zero": {"stage": 2, "offload": ON_DISK}}) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        engine.step()
        before = whole_weights(engine)
        engine.backward(square_loss(engine, rank(), 1) * float("inf"))
        with pytest.warns(UserWarning, match="the gradient of '.*' is not finite"):
            assert engine.step().skipped
        after = whole_weights(engine)
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_gradient_that_is_not_finite() -> None:
    on_ranks(2, skips_what_is_not_finite)


# ----------------------------------------------------------------------------------------------------------- failures


def nothing_is_left(folder: str) -> None:
    with partita.initialize(Stack(2), {"zero": {"stage": 3, "offload": {**ON_DISK, "path": folder}}}) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        engine.step()
        assert list(Path(folder).iterdir()) == []
    assert list(Path(folder).iterdir()) == []


def test_no_file_is_left(tmp_path: Path) -> None:
    on_ranks(2, nothing_is_left, str(tmp_path))


def test_a_folder_that_is_none() -> None:
    with tempfile.NamedTemporaryFile() as file:
        offload = {"optimizer": "disk", "path": f"{file.name}/below"}
        with pytest.raises(PartitaError, match=r"offload to disk, in '.*below'.*set zero.offload.path to"):
            partita.initialize(Stack(1), {"zero": {"offload": offload}})


def test_a_disk_that_fails_in_a_step_is_an_error(tmp_path: Path) -> None:
    with partita.initialize(Stack(2), {"zero": {"offload": {"optimizer": "disk", "path": str(tmp_path)}}}) as engine:
        engine.backward(square_loss(engine, 0, 0))
        engine.step()
        square_loss(engine, 0, 0)
        failing = mock.patch.object(Disk, "_write", side_effect=PartitaError("the disk is full"))
        with failing, pytest.raises(PartitaError, match="the disk is full"):
            for step in range(3):
                engine.backward(square_loss(engine, 0, step))
                engine.step()
        with pytest.raises(PartitaError, match="the disk is full"):
            engine.state_dict()


def test_an_optimizer_that_needs_everything_at_once_is_refused() -> None:
    model = Stack(1)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss in its step|LBFGS cannot run on"):
        partita.initialize(model, {"zero": {"offload": {"optimizer": "host"}}}, optimizer=optimizer)


def test_a_path_that_nothing_uses_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), caplog.at_level("INFO", "partita"):
        partita.initialize(Stack(1), {"zero": {"offload": {"path": "/nowhere"}}}).close()
    assert "ignored: zero.offload.path (nothing is offloaded to disk)" in caplog.text
