"""Tests of overlap on an accelerator: two operations may run at the same time if neither waits for the other."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest

from partita.optim.updates import Update
from tests.kit.ranks import on_ranks
from tests.simulated.device import register
from tests.simulated.training import PLANS, open_engine, simulated, train_step

COMPUTE = 0  # number of the compute stream; host threads have negative numbers
NUM_UNITS = 6


@dataclass(frozen=True)
class Launch:
    """An operation launched on a stream. ``known``: by stream, the time up to which its work precedes the operation."""

    what: str
    stream: int
    time: int
    known: dict[int, int]

    def waits_for(self, other: "Launch") -> bool:
        return self.known.get(other.stream, 0) >= other.time


def traced(name: str) -> list[Launch]:
    """Return the launches of a plan's third step; ``update`` marks the start of a unit's update on the host."""
    native, run = register(), Update.run

    def marked(self: Update, step: Callable[..., Any]) -> None:
        if self.segments:
            native.mark("update")
        run(self, step)

    with open_engine(PLANS[name]) as engine, mock.patch.object(Update, "run", marked):
        for step in range(2):
            train_step(engine, step, None)
        engine.zero_grad()
        native.trace(True)
        train_step(engine, 2, None)
        engine.zero_grad()  # waits for the updates
        found = native.launches()
        native.trace(False)
    return [Launch(*each) for each in found]


def launches(name: str) -> list[Launch]:
    return next(iter(on_ranks(2, simulated, traced, name, with_group=False, timeout=200)))[0]


def beside_compute(found: list[Launch], chosen: list[Launch]) -> int:
    """Return the number of chosen launches that may overlap with a launch on the compute stream."""
    compute = [each for each in found if each.stream == COMPUTE]
    return sum(any(not each.waits_for(one) and not one.waits_for(each) for each in compute) for one in chosen)


@pytest.mark.parametrize("name", ["stage 3", "all on host"])
def test_gathers_run_beside_compute(name: str) -> None:
    found = launches(name)
    gathers = [each for each in found if each.what == "all_gather"]
    assert len(gathers) >= 2 * NUM_UNITS - 1
    assert beside_compute(found, gathers) >= len(gathers) - 2


@pytest.mark.parametrize("name", ["optimizer on host", "all on host", "codes, bf16, optimizer on host"])
def test_gradients_leave_the_device_beside_backward(name: str) -> None:
    found = launches(name)
    copies = [each for each in found if each.what == "copy to host" and each.stream != COMPUTE]
    assert len(copies) >= NUM_UNITS
    assert beside_compute(found, copies[:NUM_UNITS]) >= NUM_UNITS - 1, "all but the last"


@pytest.mark.parametrize("name", ["stage 2", "in backward, stage 2"])
def test_reductions_run_beside_backward(name: str) -> None:
    found = launches(name)
    reductions = [each for each in found if each.what == "reduce_scatter"]
    assert len(reductions) == NUM_UNITS
    assert beside_compute(found, reductions) >= NUM_UNITS - 1, "all but the last"


@pytest.mark.parametrize("name", ["optimizer on host", "bf16, optimizer on host"])
def test_updated_parameters_are_copied_beside_the_next_update(name: str) -> None:
    found = launches(name)
    updates = [place for place, each in enumerate(found) if each.what == "update" and each.stream < COMPUTE]
    assert len(updates) == NUM_UNITS
    num_beside = 0
    for begin, end in pairwise(updates):
        copies = [each for each in found[begin:end] if each.what == "copy to device"]
        num_beside += any(not found[end].waits_for(each) for each in copies)
    assert num_beside >= NUM_UNITS - 2
