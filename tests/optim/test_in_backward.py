"""Updates in backward: the same results as updates at the step, without stored gradients."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import PartitaError
from partita.layout.state_bytes import model_state_bytes
from partita.memory.ledger import STATES
from partita.table.residence import Tier
from tests.features import parity
from tests.kit import seeds
from tests.kit.models import CASES, Stack, inputs, square_loss
from tests.kit.plans import ZERO, matrix, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, Trained, assert_same_bits, rank, train_recipe, whole_weights, world
from tests.memory.test_offload import RECIPES

LEAN = {"compute": "bf16", "master": "split", "moments": "int8"}
PRECISIONS: dict[str, dict[str, str]] = {"fp32": {}, "16 bits": {"compute": "bf16"}, "lean": LEAN}
OFFLOADS: dict[str, dict[str, str]] = {
    "device": {},
    "host": {"optimizer": "host", "parameters": "host"},
    "disk": {"optimizer": "disk", "parameters": "disk"},
    "optimizer on disk": {"optimizer": "disk"},
}
STAGES = ("1", "2", "3", "3-kept")


def in_backward(recipe: Recipe, zero: dict[str, Any], precision: dict[str, str]) -> Trained:
    config = {**recipe.config, "precision": {**precision, "gradients": "in_backward"}}
    config["clip_grad_norm"] = None
    return train_recipe(Recipe(recipe.build, recipe.loss, recipe.num_steps, config, recipe.before_step), zero)


def at_the_step(recipe: Recipe, zero: dict[str, Any], precision: dict[str, str]) -> Trained:
    config = {**recipe.config, "precision": precision, "clip_grad_norm": None}
    return train_recipe(Recipe(recipe.build, recipe.loss, recipe.num_steps, config, recipe.before_step), zero)


def same_numbers(name: str, precision: str, stage: str, offload: str) -> None:
    recipe = RECIPES[name]
    expected = at_the_step(recipe, ZERO["3"], PRECISIONS[precision])
    got = in_backward(recipe, {**ZERO[stage], "offload": OFFLOADS[offload]}, PRECISIONS[precision])
    assert got.norms == pytest.approx(expected.norms, rel=1e-5)
    got.norms = expected.norms  # summed in another order
    assert_same_bits(got, expected, f"{name}, {precision}, stage {stage}, {offload}")


@matrix(stage=STAGES, offload=OFFLOADS, precision=PRECISIONS, world=[1, 2])
def test_the_numbers_of_updates_at_the_step(world: int, precision: str, stage: str, offload: str) -> None:
    on_ranks(world, same_numbers, "clipped", precision, stage, offload)


@pytest.mark.parametrize(("offload", "stage"), sampled(product(OFFLOADS, ("1", "3")), ("host", "3")))
def test_on_four_ranks(stage: str, offload: str) -> None:
    on_ranks(4, same_numbers, "clipped", "lean", stage, offload)


@matrix(offload=OFFLOADS, recipe=["two forwards", "momentum", "seldom used, frozen, thawed"], stage=("1", "3"))
def test_in_every_training(recipe: str, stage: str, offload: str) -> None:
    on_ranks(2, same_numbers, recipe, "fp32", stage, offload)


def of_a_real_model(name: str) -> None:
    case, ends = CASES[name], list[dict[str, Tensor]]()
    for gradients in ("fp32", "in_backward"):
        for zero in ({"stage": 1}, {"stage": 3, "offload": OFFLOADS["disk"]}):
            config = {"zero": zero, "precision": {"gradients": gradients}, "batch": {"micro": 4}}
            with partita.initialize(case.build(), config) as engine:
                batches = parity.own_parts(case)
                for _ in range(3):
                    engine.backward(case.loss(engine(**next(batches))))
                    assert engine.step().stepped
                ends.append(whole_weights(engine))
    for end in ends[1:]:
        assert [name for name, value in end.items() if not torch.equal(value, ends[0][name])] == []


@pytest.mark.parametrize("name", ["gpt2", "resnet", "mixtral"])
def test_real_models(name: str) -> None:
    on_ranks(2, of_a_real_model, name)


# ------------------------------------------------------------------------------------------------------------- clipping


def clipped_by_hand(num_steps: int) -> tuple[float, dict[str, Tensor]]:
    """Train plain PyTorch on all ranks' samples, with the gradients of each unit clipped by the unit's own norm.

    The limit is the mean of the units' norms in the first step, so that some units are clipped and others are not.

    Returns: the limit, and the weights.
    """
    seeds.start()
    model, limit = Stack(), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        optimizer.zero_grad()
        for other in range(world()):
            (square_loss(model, other, step) / world()).backward()
        units = [list(block.parameters()) for block in model.blocks]
        units.append([*model.first.parameters(), *model.last.parameters()])
        if step == 0:
            norms = [
                nn.utils.get_total_norm([param.grad for param in unit if param.grad is not None]) for unit in units
            ]
            limit = float(torch.stack(norms).mean())
            assert min(norms) < limit < max(norms)
        for unit in units:
            nn.utils.clip_grad_norm_(unit, limit)
        optimizer.step()
    return limit, {name: param.detach().clone() for name, param in model.named_parameters()}


def clips_each_unit() -> None:
    limit, expected = clipped_by_hand(3)
    config = {"optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0}, "clip_grad_norm": limit}
    for zero in (ZERO["1"], {**ZERO["3"], "offload": OFFLOADS["host"]}):
        seeds.start()
        with partita.initialize(Stack(), {**config, "zero": zero, "precision": {"gradients": "in_backward"}}) as engine:
            for step in range(3):
                engine.backward(square_loss(engine, rank(), step))
                engine.step()
            got = whole_weights(engine)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_each_unit_is_clipped_by_itself() -> None:
    on_ranks(2, clips_each_unit)


# --------------------------------------------------------------------------------------------------------------- memory


def bytes_of(offload: dict[str, str]) -> float:
    """Check bytes of states and buffers against the plan; return the states' bytes per parameter, over all ranks."""
    config = {"precision": {**LEAN, "gradients": "in_backward"}, "zero": {"stage": 3, "offload": offload}}
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(20)))
    with partita.initialize(model, config) as engine:
        for step in range(3):
            engine.backward(engine(inputs(rank(), step, 4, 64)).square().mean())
            if step < 2:
                engine.step()
        report = engine.memory_report()
        states = {key: num for key, num in report.held.items() if key[0] in STATES}
        assert states == model_state_bytes(engine.units, rank())
        assert not any(state == "gradients" for state, _ in states)
        working = engine.blueprint.working_bytes(engine.units)
        for tier in (Tier.DEVICE, Tier.HOST):
            passing = sum(report.peak.get((kind, tier.value), 0) for kind in ("buffer_pool", "buckets", "staging"))
            assert passing <= working[tier], (tier, report.peak, working)
        return sum(engine.each(sum(states.values()))) / (20 * 64 * 64)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_six_bytes_a_parameter(offload: str) -> None:
    blocks = 2 * 4 / 256  # an fp32 scale per block of each moment
    assert on_ranks(2, bytes_of, OFFLOADS[offload]) == [pytest.approx(6 + blocks)] * 2


# --------------------------------------------------------------------------------------------------------------- errors


def engine_of(stage: int = 3, num_blocks: int = 3, **sections: Any) -> partita.Engine:
    seeds.start()
    config = {"zero": {"stage": stage}, "precision": {"gradients": "in_backward"}, **sections}
    return partita.initialize(Stack(num_blocks), config)


def refuses_what_needs_gradients(stage: int) -> None:
    with engine_of(stage) as engine:
        with pytest.raises(PartitaError, match=r"engine\.gradient: .*applied and freed in backward"):
            engine.gradient("first.weight")
        with pytest.raises(PartitaError, match=r"engine\.no_sync: .*set precision\.gradients to fp32"):
            with engine.no_sync():
                raise AssertionError
        engine.backward(square_loss(engine, rank(), 0))
        with pytest.raises(PartitaError, match="a second backward before engine.step"):
            engine.backward(square_loss(engine, rank(), 1))
        engine.zero_grad()
        before = whole_weights(engine)
        engine.backward(square_loss(engine, rank(), 2))
        assert engine.step().stepped
        assert not torch.equal(whole_weights(engine)["first.weight"], before["first.weight"])


@pytest.mark.parametrize("stage", [1, 3])
def test_what_needs_gradients_is_refused(stage: int) -> None:
    on_ranks(2, refuses_what_needs_gradients, stage)


def leaves_out_one_unit(zero: dict[str, Any], precision: dict[str, str]) -> None:
    with engine_of(zero=zero, precision={**precision, "gradients": "in_backward"}, optimizer={"lr": 1e-2}) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        engine.step()
        before = whole_weights(engine)
        block = engine.module.get_submodule("blocks.1.up")
        loss = square_loss(engine, rank(), 1)
        with engine.gathered(block):
            poison = block.weight.sum() * (math.inf if rank() == 1 else 1.0)
        engine.backward(loss + poison)
        with pytest.warns(UserWarning, match=r"step 2: the gradient of .*blocks\.1.* is not finite \(from rank 1\)"):
            result = engine.step()
        assert (result.stepped, result.skipped) == (True, True)
        assert result.grad_norm is not None
        assert not math.isfinite(result.grad_norm)
        after = whole_weights(engine)
        changed = {name.rsplit(".", 2)[0] for name, value in after.items() if not torch.equal(value, before[name])}
        assert "blocks.1" not in {name[:8] for name in changed}
        assert {"blocks.0", "blocks.2"} <= {name[:8] for name in changed}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("stage", "offload"), [(1, "device"), (3, "device"), (3, "disk"), (2, "optimizer on disk")])
def test_a_gradient_that_is_not_finite_leaves_out_its_unit(stage: int, offload: str, precision: str) -> None:
    zero = {"stage": stage, "offload": OFFLOADS[offload]}
    on_ranks(2, leaves_out_one_unit, zero, PRECISIONS[precision])


def steps_without_a_loss() -> None:
    """Check that a rank without a loss joins the update, and that a step is an error if no rank has a loss."""
    ends = []
    for stage in (1, 2):
        with engine_of(stage) as engine:
            if rank() == 0:
                engine.backward(square_loss(engine, rank(), 0))
            result = engine.step()
            assert result.stepped
            assert result.grad_norm
            after = whole_weights(engine)
            with pytest.raises(partita.PartitaError, match="no parameter has a gradient on any rank"):
                engine.step()
            assert all(torch.equal(value, after[name]) for name, value in whole_weights(engine).items())
            ends.append(after)
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_a_rank_without_a_loss() -> None:
    on_ranks(2, steps_without_a_loss)


def uses_the_users_own() -> None:
    """Check an optimizer, a scheduler and a step hook of the user."""
    called: list[Tensor] = []
    for stage in (1, 3):
        seeds.start()
        model, rates = Stack(2), []
        with partita.initialize(
            model,
            {"zero": {"stage": stage}, "precision": {"gradients": "in_backward"}},
            optimizer=lambda params: torch.optim.RMSprop(params, lr=0.1),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        ) as engine:
            engine.optimizer.register_step_post_hook(lambda *_: called.append(whole_weights(engine)["last.weight"]))
            for step in range(3):
                engine.backward(square_loss(engine, rank(), step))
                rates += engine.step().lr
                assert torch.equal(called[-1], whole_weights(engine)["last.weight"])
            assert rates == [0.1, 0.05, 0.025]
    assert len(called) == 6
    assert torch.equal(called[2], called[5])


def test_the_users_own_optimizer_scheduler_and_hook() -> None:
    on_ranks(2, uses_the_users_own)
