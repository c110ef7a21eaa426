"""Settings after a load: newly configured values apply, all others are as the saved run left them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from partita.checkpoint.settings import apply, apply_rates, changes, configured
from partita.config import schema
from partita.optim.build import build_schedule

Made = tuple[torch.optim.Optimizer, LRScheduler]
STEPS = 10


def by_config(name: str) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    section = schema.Schedule(name=name, warmup_steps=2, total_steps=STEPS)
    return lambda optimizer: build_schedule(optimizer, section)


SCHEDULES: dict[str, Callable[[Any], LRScheduler]] = {
    "constant": by_config("constant"),
    "cosine": by_config("cosine"),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 6]),
    "torch's cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        ],
        [3],
    ),
}


def made(name: str, rate: float, **more: Any) -> Made:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=rate, **more)
    return optimizer, SCHEDULES[name](optimizer)


def rates(run: Made, num_steps: int) -> list[float]:
    found = []
    for _ in range(num_steps):
        found.append(run[0].param_groups[0]["lr"])
        run[0].step()
        run[1].step()
    return found


def resumed(run: Made, before: list[dict[str, Any]], other: Made, by_state: bool = False) -> list[str]:
    """Load one run's settings into another; return the changes that are reported.

    Args:
        by_state: apply changed rates to the scheduler's state before it is loaded.
    """
    now = configured(other[0].param_groups)
    saved = {key: value for key, value in run[0].param_groups[0].items() if key != "params"}
    state = copy.deepcopy(run[1].state_dict())
    other[0].param_groups[0].update(saved)
    found = changes(0, now[0], before[0], saved)
    apply(found, other[0])
    if by_state:
        apply_rates(found, other[0], state)
    other[1].load_state_dict(state)
    if not by_state:
        apply_rates(found, *other)
    return [str(change) for change in found]


@pytest.mark.filterwarnings("ignore:.*epoch parameter.*")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("by_state", [False, True])
def test_a_rate_keeps_its_place_on_the_curve(name: str, factor: float, by_state: bool) -> None:
    run = made(name, 0.5)
    before = configured(run[0].param_groups)
    rates(run, 4)
    other = made(name, 0.5 * factor)
    said = resumed(run, before, other, by_state)
    assert len(said) == (factor != 1.0)
    assert other[1].get_last_lr() == [other[0].param_groups[0]["lr"]]
    expected = rates(run, 5)
    got = rates(other, 5)
    assert got == (expected if factor == 1.0 else pytest.approx([factor * rate for rate in expected]))


def test_settings_that_are_no_rate() -> None:
    run = made("constant", 0.5, weight_decay=0.1, momentum=0.5)
    before = configured(run[0].param_groups)
    run[0].param_groups[0].update(weight_decay=0.3, momentum=0.7)  # as a user's own schedule could
    other = made("constant", 0.5, weight_decay=0.2, momentum=0.5)
    assert resumed(run, before, other) == [
        "group 0: weight_decay is 0.2 as configured now "
        "(the saved run was configured with 0.1, and had 0.3 when it was saved)"
    ]
    group = other[0].param_groups[0]
    assert (group["weight_decay"], group["momentum"]) == (0.2, 0.7)
