"""Gradient accumulation: by batch.accumulate, by several backwards per step, and with no_sync."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from tests.kit import seeds
from tests.kit.models import Stack, inputs, square_loss
from tests.kit.plans import TIERS, ZERO, matrix
from tests.kit.ranks import on_ranks
from tests.kit.state import assert_idle
from tests.kit.training import ADAMW, rank, small_buckets, train_module, whole_weights, world

NUM_STEPS, NUM_PARTS = 2, 4
STILL = {"name": "sgd", "lr": 0.0}


def plain_training() -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process on the micro-batches of all ranks. Return the mean loss of each step and the weights."""
    seeds.start()
    found = train_module(Stack(), square_loss, NUM_STEPS, num_data=NUM_PARTS, own=None)
    return found.losses, found.weights


def micro_batch(step: int, part: int) -> Tensor:
    """Return part ``part`` of a step's global batch, ``[4, 16]``."""
    return inputs(part, step)


def trained(zero: Mapping[str, Any], how: str) -> tuple[list[float], list[float | None], dict[str, Tensor]]:
    """Train on the same global batches, accumulated as ``how`` names. Return mean losses, norms and weights."""
    accumulate = NUM_PARTS // world()
    config = {
        "optimizer": ADAMW,
        "zero": zero,
        "batch": {"accumulate": 1 if how == "several backwards" else accumulate},
    }
    seeds.start()
    losses, norms = [], []
    with small_buckets(), partita.initialize(Stack(), config) as engine:
        for step in range(NUM_STEPS):
            total = 0.0
            for turn in range(accumulate):
                x, last = micro_batch(step, turn * world() + rank()), turn == accumulate - 1
                loss = engine(x).square().mean()
                total += engine.mean(loss).item() / accumulate
                if how == "several backwards":
                    engine.backward(loss / accumulate)
                elif (how == "no_sync but the last" and not last) or how == "no_sync around all":
                    with engine.no_sync():
                        engine.backward(loss)
                else:
                    engine.backward(loss)
                if how != "several backwards" or last:
                    result = engine.step()
                    assert result.stepped == last
                    assert (result.grad_norm is None) == (not last)
            losses.append(total)
            norms.append(result.grad_norm)
            assert_idle(engine)
        return losses, norms, whole_weights(engine)


# engine.backward divides by batch.accumulate. It is 1 for "several backwards", so `trained` divides the loss itself.
HOW = ("engine.backward", "several backwards", "no_sync but the last", "no_sync around all")


def compare(how: str) -> None:
    losses, weights = plain_training()
    for name, zero in ZERO.items():
        got_losses, norms, got_weights = trained(zero, how)
        torch.testing.assert_close(got_losses, losses, rtol=1e-5, atol=0, msg=name)
        assert all(norm is not None and norm > 0 for norm in norms)
        for key, expected in weights.items():
            torch.testing.assert_close(got_weights[key], expected, rtol=1e-4, atol=1e-6, msg=f"{name}: {key}")


def everything_in_no_sync() -> None:
    """Check that engine.step inside no_sync reduces the collected gradients."""
    _, weights = plain_training()
    for zero in ZERO.values():
        seeds.start()
        config = {"optimizer": ADAMW, "zero": zero, "batch": {"accumulate": NUM_PARTS // world()}}
        with small_buckets(), partita.initialize(Stack(), config) as engine:
            with engine.no_sync():
                for step in range(NUM_STEPS):
                    for turn in range(NUM_PARTS // world()):
                        engine.backward(engine(micro_batch(step, turn * world() + rank())).square().mean())
                        engine.step()
            got = whole_weights(engine)
        for key, expected in weights.items():
            torch.testing.assert_close(got[key], expected, rtol=1e-4, atol=1e-6)


def reductions(how: str, stage: int) -> tuple[int, int]:
    """Return the number of gradient reductions in a step, and the bytes that they send."""
    config = {"zero": {"stage": stage}, "batch": {"accumulate": 2}}
    with partita.initialize(Stack(), config) as engine:
        before = engine.traffic_report()
        for turn in range(2):
            loss = engine(micro_batch(0, turn)).square().mean()
            if how == "no_sync" and turn == 0:
                with engine.no_sync():
                    engine.backward(loss)
            else:
                engine.backward(loss)
            engine.step()
        rows = [row for key, row in engine.traffic_report().since(before).rows.items() if key.purpose == "gradients"]
        return sum(row.calls for row in rows), sum(row.sent_bytes for row in rows)


def no_sync_saves() -> None:
    once, _ = reductions("no_sync", 2)
    assert reductions("", 2)[0] == 2 * once
    assert reductions("no_sync", 2)[1] * 2 == reductions("", 2)[1]
    assert reductions("", 1) == reductions("no_sync", 1), "stage 1 reduces the last micro-batch only"


def no_gradient_between() -> None:
    """Check that engine.gradient between micro-batches returns the gradients collected so far, reduced or not."""
    config = {"batch": {"accumulate": 2}}
    for name, zero in ZERO.items():
        seeds.start()
        with small_buckets(), partita.initialize(Stack(), {**config, "zero": zero}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            half = engine.gradient("first.weight")
            engine.step()
            again = engine.gradient("first.weight")
            with engine.no_sync():
                engine.backward(square_loss(engine, rank(), 0))
            full = engine.gradient("first.weight")
        assert half is not None
        torch.testing.assert_close(again, half, msg=name)
        torch.testing.assert_close(full, 2 * half, msg=name)


def zeroed() -> None:
    """Check that zero_grad drops the collected gradients, reduced or not."""
    for zero in ZERO.values():
        for sync in (True, False):
            seeds.start()
            with small_buckets(), partita.initialize(Stack(), {"zero": zero, "batch": {"accumulate": 2}}) as engine:
                if sync:
                    engine.backward(square_loss(engine, rank(), 7))
                else:
                    with engine.no_sync():
                        engine.backward(square_loss(engine, rank(), 7))
                engine.zero_grad()
                assert engine.gradient("first.weight") is None
                engine.backward(square_loss(engine, rank(), 0))
                first = engine.gradient("first.weight")
                engine.zero_grad()
                engine.backward(square_loss(engine, rank(), 0))
                assert first is not None
                assert torch.equal(engine.gradient("first.weight"), first)


class Branches(nn.Module):
    """Two stacks, of which forward runs the one that ``chosen`` names, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Stack(1), Stack(1)
        self.chosen = "both"

    def forward(self, x: Tensor) -> Tensor:
        other: Tensor = self.other(x)
        return other + self.one(x) if self.chosen == "both" else other


def norms_of_one_branch(zero: Mapping[str, Any], factor: float, in_no_sync: bool) -> list[float | None]:
    """Return the norms of a step with both branches, whose loss is multiplied by ``factor``, and of one with one."""
    seeds.start()
    norms = []
    with small_buckets(), partita.initialize(Branches(), {"optimizer": STILL, "zero": zero}) as engine:
        engine.backward(factor * square_loss(engine, rank(), 0))
        norms.append(engine.step().grad_norm)
        engine.module.chosen = "other"
        with engine.no_sync() if in_no_sync else nullcontext():
            engine.backward(square_loss(engine, rank(), 1))
        norms.append(engine.step().grad_norm)
    return norms


def no_earlier_sum() -> None:
    """Check that the norm of a batch without reduce passes has no sums of the batch before, even non-finite ones."""
    for name, zero in {**ZERO, "3-host": TIERS["3-host"]}.items():
        _, expected = norms_of_one_branch(zero, 100.0, in_no_sync=False)
        _, norm = norms_of_one_branch(zero, 100.0, in_no_sync=True)
        assert norm == pytest.approx(expected, rel=1e-6), name
        with pytest.warns(UserWarning, match="is not finite"):
            _, norm = norms_of_one_branch(zero, math.inf, in_no_sync=True)
        assert norm == pytest.approx(expected, rel=1e-6), name


@matrix(how=HOW, world=[1, 2, 4])
def test_one_global_batch_in_any_parts(how: str, world: int) -> None:
    on_ranks(world, compare, how)


def test_step_inside_no_sync() -> None:
    on_ranks(2, everything_in_no_sync)


def test_the_norm_in_no_sync_is_that_of_this_batch() -> None:
    on_ranks(2, no_earlier_sum)


def test_no_sync_saves_reductions() -> None:
    on_ranks(2, no_sync_saves)


def test_gradients_between_micro_batches() -> None:
    on_ranks(2, no_gradient_between)


@pytest.mark.parametrize("world", [1, 2])
def test_zero_grad(world: int) -> None:
    on_ranks(world, zeroed)
