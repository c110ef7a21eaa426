"""A running average that all ranks derive from changes of parameters: of what is sent it is taken out again."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partita
from partita.planner.memory import model_state_bytes
from partita.sharding.carrier import Carrier
from partita.sharding.held_back import HeldBack
from partita.sharding.unit import Member
from tests import seeds
from tests.local import pool
from tests.local.lossless import lossless
from tests.local.test_feedback import feedbacks
from tests.local.training import PLANS, Stack, rank, square_loss, whole_weights, world
from tests.matrix import matrix, sampled

WARM_UP, STEPS = 3, 9
SHARE = 0.8
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3, "betas": [0.8, 0.95]}
BOTH = {"gradients": "ternary", "parameters": "ternary", "warmup_steps": WARM_UP}


def asked(plan: str, **more: Any) -> dict[str, Any]:
    communication = BOTH | {"carrier": SHARE} | more.pop("communication", {})
    zero = PLANS[plan] | more.pop("zero", {})
    return {"zero": zero, "optimizer": {"name": "onebit_adam", **ADAM}, "communication": communication, **more}


def model() -> nn.Module:
    seeds.start()
    return Stack(2)


def carriers(engine: partita.Engine) -> list[Carrier]:
    return [feedback.carrier for feedback in feedbacks(engine) if feedback.carrier is not None]


def step(engine: partita.Engine, number: int) -> float:
    loss = square_loss(engine, rank(), number)
    engine.backward(loss)
    assert not engine.step().skipped
    return loss.item()


def trained(config: dict[str, Any], accumulate: int) -> dict[str, Tensor]:
    with partita.initialize(model(), config) as engine:
        for number in range(STEPS * accumulate):
            step(engine, number)
        return whole_weights(engine)


def lossless_is_without(plan: str, accumulate: int) -> None:
    """Codes that lose nothing: what is put in is taken out again, and the carrier is the average itself."""
    sections = {"batch": {"accumulate": accumulate}}
    full = {"gradients": "full", "parameters": "full", "carrier": 0.0}
    expected = trained(asked(plan, communication=full, **sections), accumulate)
    with lossless("ternary"):
        got = trained(asked(plan, **sections), accumulate)
        with partita.initialize(model(), asked(plan)) as engine:
            for number in range(STEPS):
                step(engine, number)
            engine._parts.updater.wait_for_updates()
            seen = torch.cat([carrier.values.flatten() for carrier in carriers(engine)])
            assert seen.abs().max() > 1e-4
            taken = held_averages(engine)
            for own, average in zip(carriers(engine), taken, strict=True):
                inside = average.abs() < 0.5 * own.divisors  # where the update was not capped; decay is in the change
                assert inside.float().mean() > 0.05
                near = (own.values - average).abs() <= 0.12 * own.divisors + 1e-6
                assert bool(near[inside].all())
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-4, atol=2e-5)


def held_averages(engine: partita.Engine) -> list[Tensor]:
    """The optimizer's running averages, whole, laid out as the carriers are."""
    before = [carrier.values.clone() for carrier in carriers(engine)]
    engine._parts.updater.loaded()
    found = [carrier.values.clone() for carrier in carriers(engine)]
    for carrier, values in zip(carriers(engine), before, strict=True):
        carrier.values.copy_(values)
    return found


def alike(plan: str, offload: str) -> list[float]:
    """Carriers and divisors are the same bits on all ranks, follow from what was told, and change the run."""
    config = asked(plan, zero={"offload": {"optimizer": offload}}, clip_grad_norm=0.5)
    with partita.initialize(model(), config) as engine:
        losses = []
        for number in range(STEPS):
            losses.append(step(engine, 0 if number % 2 else 1))
            engine._parts.updater.wait_for_updates()
            for carrier in carriers(engine):
                for values in (carrier.values, carrier.divisors):
                    every = [torch.empty_like(values) for _ in range(world())]
                    dist.all_gather(every, values.contiguous())
                    assert all(torch.equal(values, other) for other in every), number
                    assert bool(values.any()) == (number >= WARM_UP - 1), number
        held = {key: size for key, size in engine.memory_report().held.items() if key[0] == "carrier"}
        planned = model_state_bytes(engine.units, rank())
        assert held == {key: size for key, size in planned.items() if key[0] == "carrier"}
        assert [tier for _, tier in held] == ["host" if offload == "host" else "device"]
        weights = whole_weights(engine)
    without = trained_alike(config | {"communication": BOTH | {"carrier": 0.0}})
    assert any(not torch.equal(weights[name], weight) for name, weight in without.items())
    return losses


def trained_alike(config: dict[str, Any]) -> dict[str, Tensor]:
    with partita.initialize(model(), config) as engine:
        for number in range(STEPS):
            step(engine, 0 if number % 2 else 1)
        return whole_weights(engine)


def rate_of(member: Member) -> float:
    return 3e-3 if member.fqn.endswith("bias") else 6e-3


def follows_several_rates(plan: str) -> None:
    """Of an exact change the carrier is the capped step times the divisor, by each parameter's own rate."""
    take_out = HeldBack.take_out_carriers
    told = mock.patch.object(HeldBack, "take_out_carriers", lambda held_back, _: take_out(held_back, rate_of))
    with told, lossless("ternary"), partita.initialize(model(), asked(plan)) as engine:
        for number in range(WARM_UP):
            step(engine, number)
        before = {name: weight.clone() for name, weight in whole_weights(engine).items()}
        step(engine, WARM_UP)
        after = whole_weights(engine)
        for feedback in feedbacks(engine):
            carrier = feedback.carrier
            assert carrier is not None
            for member in feedback._layout.members:
                change = member.flat((after[member.fqn] - before[member.fqn]).view(member.shape))
                for piece in feedback._layout.pieces[id(member)]:
                    divisors = piece.of(carrier.divisors[piece.row])
                    expected = (-change[piece.start : piece.stop] / rate_of(member)).clamp(-1, 1) * divisors
                    got = piece.of(carrier.values[piece.row])
                    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-5)


def resumed(folder: Path, plan: str, at: int) -> None:
    """A run that goes on from a checkpoint is the one that was saved, also where codes begin in between."""
    config = asked(plan)

    def go(engine: partita.Engine, first: int) -> None:
        for number in range(first, STEPS):
            step(engine, number)
            if number + 1 == at and not first:
                engine.save(folder)

    with partita.initialize(model(), config) as engine:
        go(engine, 0)
        continued = whole_weights(engine)
    with partita.initialize(model(), config) as engine:
        engine.load(folder)
        go(engine, at)
        for name, weight in whole_weights(engine).items():
            assert torch.equal(weight, continued[name]), name


def saved(folder: Path, plan: str) -> dict[str, Tensor]:
    """Once it is saved, every rank's carrier is the optimizer's running average."""
    with partita.initialize(model(), asked(plan)) as engine:
        for number in range(STEPS):
            step(engine, number)
        engine.save(folder)
        return by_name(engine)


def loaded(folder: Path, plan: str) -> dict[str, Tensor]:
    with partita.initialize(model(), asked(plan)) as engine:
        engine.load(folder)
        found = by_name(engine)
        losses = [step(engine, 0) for _ in range(4)]
        assert losses[-1] < losses[0]
        return found


def by_name(engine: partita.Engine) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for feedback in feedbacks(engine):
        assert feedback.carrier is not None
        for member in feedback._layout.members:
            pieces = [piece.of(feedback.carrier.values[piece.row]) for piece in feedback._layout.pieces[id(member)]]
            found[member.fqn] = torch.cat(pieces).clone()
    return found


def left_out(plan: str) -> None:
    """A step that is not finite on one rank leaves carriers alone."""
    with partita.initialize(model(), asked(plan)) as engine:
        for number in range(WARM_UP + 2):
            step(engine, number)
        before = by_name(engine)
        loss = square_loss(engine, rank(), 0)
        engine.backward(loss * float("inf") if rank() == 1 else loss)
        with pytest.warns(UserWarning, match="the update is skipped"):
            assert engine.step().skipped
        assert all(torch.equal(values, before[name]) for name, values in by_name(engine).items())
        step(engine, 1)
        assert any(not torch.equal(values, before[name]) for name, values in by_name(engine).items())


# -- tests -------------------------------------------------------------------------------------------------------------


@matrix(plan=["1", "2"], accumulate=[1, 2], ranks=[2, 4])
def test_with_codes_that_lose_nothing_it_changes_nothing(plan: str, accumulate: int, ranks: int) -> None:
    pool.run(ranks, lossless_is_without, plan, accumulate)


@pytest.mark.parametrize(
    ("plan", "offload", "ranks"), sampled([("1", "none", 4), ("2", "host", 2), ("2", "none", 2)], ("2", "host", 2))
)
def test_every_rank_has_the_same_bits(plan: str, offload: str, ranks: int) -> None:
    losses, *_ = pool.run(ranks, alike, plan, offload)
    assert losses[-1] < losses[1]


def test_it_follows_from_what_was_told() -> None:
    pool.run(2, follows_several_rates, "2")


@pytest.mark.parametrize(("plan", "at"), sampled([("1", 6), ("2", 2), ("2", 5)], ("1", 6)))
def test_a_resumed_run_is_the_continued_one(tmp_path: Path, plan: str, at: int) -> None:
    pool.run(2, resumed, tmp_path, plan, at)


def test_any_layout_loads(tmp_path: Path) -> None:
    saved_there, *_ = pool.run(2, saved, tmp_path, "2")
    here, *others = pool.run(4, loaded, tmp_path, "1")
    for name, values in saved_there.items():
        assert torch.equal(values, here[name]), name
        assert all(torch.equal(values, other[name]) for other in others), name


def test_a_step_that_is_left_out_changes_nothing() -> None:
    pool.run(2, left_out, "1")
