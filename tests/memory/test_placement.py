"""Offload ``auto``: states on several tiers, the same bits as without offload, and agreement of the ranks."""

import contextlib
import itertools
import logging
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import PartitaError
from partita.config.resolve import resolve
from partita.engine import budget as agreed
from partita.errors import ConfigError
from partita.layout.blueprint import make_blueprint
from partita.layout.budget import MemoryBudget
from partita.layout.state_bytes import model_state_bytes
from partita.table.residence import Tier
from partita.table.state_plan import Tiers
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.plans import ZERO, matrix, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, assert_same_bits, rank, train_recipe, whole_weights, world
from tests.memory.test_offload import RECIPES

AUTO = {"parameters": "auto", "optimizer": "auto"}
PLENTY = 10**12
STACK = RECIPES["clipped"]
TALL = replace(STACK, build=partial(Stack, 24))
TRAININGS = {
    **RECIPES,
    "seldom used, frozen, thawed": replace(
        RECIPES["seldom used, frozen, thawed"], config={"zero": {"units": ["Block", "Linear"]}}
    ),
}
STATES = ("parameters", "gradients", "master", "moments")


@contextlib.contextmanager
def having(budget: MemoryBudget) -> Iterator[None]:
    """Pretend that the machine has this budget for each rank."""
    with (
        mock.patch.object(agreed, "free_budget", return_value=budget),
        mock.patch.object(MemoryBudget, "shared", autospec=True, side_effect=lambda budget, num_ranks: budget),
    ):
        yield


def tiers_of(stage: str, budget: MemoryBudget, recipe: Recipe = STACK, model: nn.Module | None = None) -> list[Tiers]:
    """Return the tiers of each unit's states under this budget; empty if they do not fit."""
    config = partita.Config(zero={**recipe.config.get("zero", {}), **ZERO[stage], "offload": AUTO})
    try:
        blueprint = make_blueprint(model or recipe.built(), resolve(config, world(), "cpu"), budget=budget)
    except ConfigError:
        return []
    rows = [unit.row for unit in blueprint.units]
    return [Tiers(row.param_stored.tier, row.grad_step.tier, row.master.tier) for row in rows]


def mixed_budgets(stage: str, recipe: Recipe = STACK) -> list[MemoryBudget]:
    """Return a budget that places parameters, and one that places optimizer states, on the device and elsewhere."""
    model, found = recipe.built(), dict[str, MemoryBudget]()
    for device, host in itertools.product(range(40_000, 260_000, 8_000), (60_000, 100_000, 160_000, 260_000)):
        tiers = tiers_of(stage, budget := MemoryBudget(device, host, PLENTY), recipe, model)
        for state in ("parameters", "optimizer"):
            if {getattr(t, state) for t in tiers} > {Tier.DEVICE}:
                found.setdefault(state, budget)
        if len(found) == 2:
            break
    return list(found.values())


def three_tiers() -> MemoryBudget:
    """Return a budget that places the optimizer states of 24 blocks on all three tiers, at stage 3."""
    model = TALL.built()

    def holds(tier: Tier, device: int, host: int) -> bool:
        return tier in {t.optimizer for t in tiers_of("3", MemoryBudget(device, host, PLENTY), TALL, model)}

    # More memory never moves states to a slower tier, so bisection finds the least device memory that some states use,
    # and then the least host memory.
    device = bisect_left(range(PLENTY), True, key=lambda num: holds(Tier.DEVICE, num, PLENTY))
    host = bisect_left(range(PLENTY), True, key=lambda num: holds(Tier.HOST, device, num))
    assert all(holds(tier, device, host) for tier in Tier)
    return MemoryBudget(device, host, PLENTY)


def on_three_tiers() -> None:
    expected, budget = train_recipe(TALL, ZERO["3"]), three_tiers()
    with having(budget):
        assert_same_bits(train_recipe(TALL, {**ZERO["3"], "offload": AUTO}), expected, str(budget))


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_the_same_bits_on_three_tiers(num_ranks: int) -> None:
    on_ranks(num_ranks, on_three_tiers, timeout=240)


def the_same_bits(stages: tuple[str, ...], recipe: str) -> int:
    num = 0
    for stage in stages:
        expected = train_recipe(TRAININGS[recipe], ZERO[stage])
        for budget in mixed_budgets(stage, TRAININGS[recipe]):
            with having(budget):
                assert_same_bits(
                    train_recipe(TRAININGS[recipe], {**ZERO[stage], "offload": AUTO}),
                    expected,
                    f"stage {stage}, {budget}",
                )
                num += 1
    return num


@matrix(num_ranks=[1, 2, 4], stage=["1", "2", "3"])
def test_the_same_bits_with_states_here_and_there(num_ranks: int, stage: str) -> None:
    assert on_ranks(num_ranks, the_same_bits, (stage,), "clipped", timeout=240) == [2] * num_ranks


@pytest.mark.parametrize("recipe", sampled(["16 bits", "momentum", "seldom used, frozen, thawed"], "16 bits"))
def test_the_same_bits_in_every_training(recipe: str) -> None:
    """Other recipes also have the same bits as without offload.

    The budgets are found for fp32 and Adam, so with other recipes they place other units on the tiers.
    """
    assert min(on_ranks(2, the_same_bits, ("1", "3"), recipe, timeout=240)) >= 2


class Counting(torch.optim.AdamW):
    """An AdamW that counts its steps in the param group, as some optimizers do, and lowers its rate by the count."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


def counted(hooked: bool) -> list[dict[str, Tensor]]:
    ends = []
    for offload in ({}, AUTO):
        seeds.start()
        model = Stack(5)
        with having(mixed_budgets("1")[-1]):
            engine = partita.initialize(model, {"zero": {"offload": offload}}, optimizer=Counting)
        with engine:
            if hooked:
                engine.optimizer.register_step_post_hook(lambda *_: None)
            for step in range(3):
                engine.backward(square_loss(engine, 0, step))
                engine.step()
            ends.append({**whole_weights(engine), "count": torch.tensor(engine.optimizer.param_groups[0]["count"])})
    return ends


@pytest.mark.parametrize("hooked", sampled([False, True], True))
def test_an_optimizer_that_counts_in_its_groups(hooked: bool) -> None:
    """A step counts once, although some units are updated at once and others asynchronously."""
    partita.elementwise(Counting)
    plain, placed = counted(hooked)
    assert int(plain["count"]) == 3
    assert [name for name in plain if not torch.equal(plain[name], placed[name])] == []


def hooked_on(ranks: tuple[int, ...]) -> dict[str, Tensor]:
    """Train with some units updated on the device and some on the host, and with a hook on the optimizer's step."""
    seeds.start()
    with having(mixed_budgets("1")[-1]):
        engine = partita.initialize(Stack(5), {"zero": {"stage": 1, "offload": AUTO}}, optimizer=torch.optim.AdamW)
    with engine:
        assert {unit.planned.row.updates_on_device for unit in engine._parts.runtime.units} == {True, False}
        calls = list[int]()
        if rank() in ranks:
            engine.optimizer.register_step_post_hook(lambda *_: calls.append(len(calls)))
        for step in range(3):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
        assert len(calls) == (3 if rank() in ranks else 0)
        weights = whole_weights(engine)
        assert {int(state["step"]) for state in engine.optimizer.state.values()} == {3}
        return weights


def test_a_hook_on_the_step_of_one_rank() -> None:
    """Gathers of updates on the device and on the host have the same order on all ranks."""
    for expected, found in zip(on_ranks(2, hooked_on, ()), on_ranks(2, hooked_on, (1,), timeout=30), strict=True):
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def as_the_table_says(stage: str, offload: dict[str, str]) -> list[str]:
    said = []
    for budget in mixed_budgets(stage):
        records = list[str]()
        log = logging.getLogger("partita")
        before, log.level = log.level, logging.INFO
        handler = mock.Mock(level=logging.INFO, handle=lambda record: records.extend(record.getMessage().splitlines()))
        log.addHandler(handler)
        try:
            with having(budget), partita.initialize(Stack(5), {"zero": {**ZERO[stage], "offload": offload}}) as engine:
                for step in range(3):
                    engine.backward(square_loss(engine, rank(), step))
                    if step < 2:
                        engine.step()
                report = engine.memory_report()
                planned = model_state_bytes(engine.units, rank())
                assert {key: num for key, num in report.held.items() if key[0] in STATES} == planned
                assert planned == engine.planned_bytes
                at_most = engine.blueprint.working_bytes(engine.units)
                extra = {key: num for key, num in report.peak.items() if key[0] not in STATES}
                assert (
                    extra.get(("buffer_pool", "device"), 0) + extra.get(("buckets", "device"), 0)
                    <= at_most[Tier.DEVICE]
                )
                assert extra.get(("staging", "host"), 0) <= at_most[Tier.HOST]
        finally:
            log.removeHandler(handler)
            log.level = before
        assert len(records) <= 10
        said += [line for line in records if line.startswith("offload: ")]
    return said


@matrix(stage=["1", "3"], num_ranks=[1, 2])
def test_bytes_are_where_the_table_and_the_announcement_say(num_ranks: int, stage: str) -> None:
    first = on_ranks(num_ranks, as_the_table_says, stage, AUTO, timeout=240)[0]
    assert len(first) == 2
    assert all(line.startswith("offload: parameters ") and line.count(";") == 2 for line in first)
    assert on_ranks(num_ranks, as_the_table_says, stage, AUTO, timeout=240)[0] == first


def of_different_ranks() -> list[Tiers]:
    """Train with less memory on rank 1 than on rank 0, and return the tiers of all units."""
    large, small = MemoryBudget(PLENTY, PLENTY, PLENTY), mixed_budgets("3")[0]
    with having(small if rank() == 1 else large):
        with partita.initialize(Stack(5), {"zero": {"stage": 3, "offload": AUTO}}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            placed = [Tiers(row.param_stored.tier, row.grad_step.tier, row.master.tier) for row in engine.plan.values()]
    assert placed == tiers_of("3", small)
    return placed


def test_all_ranks_place_states_as_the_poorest_can() -> None:
    one, other = on_ranks(2, of_different_ranks)
    assert one == other


def a_rank_that_cannot_tell() -> None:
    error = mock.Mock(side_effect=PartitaError("the folder is gone"))
    with mock.patch.object(agreed, "free_budget", error) if rank() == 1 else contextlib.nullcontext():
        with pytest.raises(PartitaError, match="the folder is gone .on rank 1."):
            partita.initialize(Stack(1), {"zero": {"offload": AUTO}})


def test_an_error_of_one_rank_is_every_ranks() -> None:
    on_ranks(2, a_rank_that_cannot_tell)


def test_this_machine_has_room_on_the_device_for_a_small_model() -> None:
    with partita.initialize(Stack(2), {"zero": {"offload": AUTO}}) as engine:
        assert {tier for _, tier in engine.planned_bytes} == {"device"}


def test_what_does_not_fit_anywhere_leaves_the_model_as_it_was() -> None:
    model = Stack(2)
    with having(MemoryBudget(1000, 0, 1000)), pytest.raises(ConfigError, match="do not fit"):
        partita.initialize(model, {"zero": {"offload": AUTO}})
    assert model(torch.ones(1, 16)).isfinite().all()
