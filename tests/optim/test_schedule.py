"""Schedules equal their closed forms, and torch's schedulers where torch has the same schedule."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

from partita.config.schema import Schedule
from partita.optim.build import build_schedule

PEAK = 0.4
RATES = st.floats(1e-6, 1.0)


def optimizer(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])


def rates_of(
    schedule: Callable[[torch.optim.Optimizer], LRScheduler], num_steps: int, *peaks: float
) -> list[list[float]]:
    """Return the learning rate of each update, one list per parameter group."""
    updated = optimizer(*peaks)
    scheduler, rates = schedule(updated), []
    for _ in range(num_steps):
        rates.append([group["lr"] for group in updated.param_groups])
        updated.step()
        scheduler.step()
    return [list(group) for group in zip(*rates, strict=True)]


def built(num_steps: int, *peaks: float, **section: object) -> list[list[float]]:
    return rates_of(lambda updated: build_schedule(updated, Schedule.model_validate(section)), num_steps, *peaks)


def test_by_default_the_rate_is_constant() -> None:
    assert built(5, PEAK) == [[PEAK] * 5]


def test_a_constant_schedule_leaves_another_schedulers_first_rate() -> None:
    updated = optimizer(PEAK)
    torch.optim.lr_scheduler.LambdaLR(updated, lambda step: 0.5)
    build_schedule(updated, Schedule())
    assert updated.param_groups[0]["lr"] == 0.5 * PEAK


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    (rates,) = built(6, PEAK, warmup_steps=3)
    assert rates == pytest.approx([PEAK * part for part in (0.25, 0.5, 0.75, 1, 1, 1)])


def test_linear() -> None:
    (rates,) = built(8, PEAK, name="linear", warmup_steps=2, total_steps=6, min_lr=0.1)
    assert rates == pytest.approx([PEAK / 3, 2 * PEAK / 3, 0.4, 0.325, 0.25, 0.175, 0.1, 0.1])


def test_cosine() -> None:
    (rates,) = built(7, PEAK, name="cosine", total_steps=4, min_lr=0.2)
    half = 0.5 * (1 + math.cos(math.pi / 4))
    assert rates == pytest.approx([0.4, 0.2 + 0.2 * half, 0.3, 0.4 - 0.2 * half, 0.2, 0.2, 0.2])


@given(st.sampled_from(["linear", "cosine"]), RATES, st.floats(0.0, 1.0), st.integers(0, 10), st.integers(1, 20))
def test_shape(name: str, peak: float, share: float, warmup: int, decay: int) -> None:
    """The rate rises to the peak at the first update after the warm-up, and falls to ``min_lr`` at ``total_steps``."""
    least, total = share * peak, warmup + decay
    (rates,) = built(total + 3, peak, name=name, warmup_steps=warmup, total_steps=total, min_lr=least)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert all(rate > 0 for rate in rates[:warmup])
    assert rates[warmup] == pytest.approx(peak)
    assert all(
        before >= after or math.isclose(before, after)
        for before, after in zip(rates[warmup:], rates[warmup + 1 :], strict=False)
    )
    assert rates[total:] == pytest.approx([least] * 3)
    middle = (rates[warmup + decay // 2], peak - (peak - least) * (decay // 2) / decay)
    assert name == "cosine" or middle[0] == pytest.approx(middle[1])


def test_a_warm_up_as_long_as_the_schedule() -> None:
    (rates,) = built(4, PEAK, name="linear", warmup_steps=2, total_steps=2, min_lr=0.1)
    assert rates == pytest.approx([PEAK / 3, 2 * PEAK / 3, PEAK, 0.1])


@given(st.integers(1, 20), st.floats(0.0, 1.0))
def test_the_same_as_torch(num_steps: int, share: float) -> None:
    least = share * PEAK
    linear = rates_of(lambda o: LinearLR(o, 1.0, share, num_steps), num_steps, PEAK)
    cosine = rates_of(lambda o: CosineAnnealingLR(o, num_steps, least), num_steps, PEAK)
    for name, expected in (("linear", linear), ("cosine", cosine)):
        got = built(num_steps, PEAK, name=name, total_steps=num_steps, min_lr=least)
        assert got[0] == pytest.approx(expected[0], abs=1e-9)


def test_groups_keep_their_own_rates_and_end_at_min_lr() -> None:
    first, second, low, none = built(3, 0.4, 0.2, 0.05, 0.0, name="linear", total_steps=2, min_lr=0.1)
    assert first == pytest.approx([0.4, 0.25, 0.1])
    assert second == pytest.approx([0.2, 0.15, 0.1])
    assert low == [0.05] * 3, "a rate below min_lr is not raised"
    assert none == [0.0] * 3


def test_a_warm_up_from_a_rate_that_is_held_first() -> None:
    (rates,) = built(8, PEAK, warmup_steps=4, initial_lr=0.1, initial_steps=2)
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.175, 0.25, 0.325, PEAK, PEAK])


def test_a_logarithmic_warm_up() -> None:
    (rates,) = built(5, PEAK, warmup_steps=4, warmup="log", initial_lr=0.1)
    assert rates == pytest.approx([0.1 + 0.3 * math.log(step + 1) / math.log(4) for step in range(4)] + [PEAK])
    (rates,) = built(4, PEAK, warmup_steps=3, warmup="log")
    assert rates == pytest.approx([PEAK * math.log(step + 2) / math.log(4) for step in range(3)] + [PEAK])


def test_decay_in_the_last_steps() -> None:
    (rates,) = built(9, PEAK, name="linear", warmup_steps=1, total_steps=8, decay_steps=4, min_lr=0.1)
    assert rates == pytest.approx([PEAK / 2, PEAK, PEAK, PEAK, PEAK, 0.325, 0.25, 0.175, 0.1])


def test_the_lowest_rate_as_a_share_of_each_groups_own() -> None:
    first, second = built(3, 0.4, 0.2, name="linear", total_steps=2, min_ratio=0.5, min_lr=0.15)
    assert first == pytest.approx([0.4, 0.3, 0.2])
    assert second == pytest.approx([0.2, 0.175, 0.15]), "the higher of both holds"


def test_a_highest_rate_for_all_groups() -> None:
    first, second = built(4, 0.4, 0.0, name="linear", warmup_steps=1, total_steps=3, max_lr=0.2)
    assert first == second == pytest.approx([0.1, 0.2, 0.1, 0.0])


def test_groups_below_the_initial_rate_keep_theirs() -> None:
    first, second, none = built(3, 0.4, 0.1, 0.0, warmup_steps=2, initial_lr=0.2)
    assert first == pytest.approx([0.2, 0.3, 0.4])
    assert second == [0.1] * 3
    assert none == [0.0] * 3


def test_a_schedule_goes_on_from_its_state() -> None:
    section = Schedule(name="cosine", total_steps=6)
    first, second = optimizer(PEAK), optimizer(PEAK)
    before, after = build_schedule(first, section), build_schedule(second, section)
    for _ in range(3):
        first.step()
        before.step()
    after.load_state_dict(before.state_dict())
    first.step()
    second.step()
    before.step()
    after.step()
    assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"] != PEAK
