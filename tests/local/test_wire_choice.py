"""What the first steps say of wires: bytes are the plan's, and nothing is switched on."""

import logging

import pytest
import torch

import partita
from partita.engine.wire_choice import MEASURED, SETTLING, Measured, choose, describe, wires_for
from tests.local import pool
from tests.local.training import PLANS, Recipe, Stack, rank, square_loss, whole_weights

WIRES = {"full": 100_000_000, "gradients: int4": 12_000_000, "gradients: ternary": 5_000_000}


@pytest.mark.parametrize(
    ("compute_s", "megabit", "chosen"),
    [(1.0, 10_000, "full"), (1.0, 2_000, "gradients: int4"), (0.01, 100, "gradients: ternary")],
)
def test_what_loses_least_of_the_fast_ones(compute_s: float, megabit: int, chosen: str) -> None:
    measured = Measured(compute_s, megabit * 1e6 / 8)
    assert choose(measured, WIRES) == chosen
    assert ("you have to ask for" in describe(measured, WIRES)) == (chosen != "full")


def measures(plan: str) -> tuple[dict[str, int], list[str], int]:
    """The wires, what is logged, and what full gradients send; the run is that of full ones."""
    said = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    weights = []
    for gradients in ("auto", "full"):
        config = {"zero": PLANS[plan], "communication": {"gradients": gradients}}
        with partita.initialize(Recipe(lambda: Stack(2)).built(), config) as engine:
            logger = logging.getLogger("partita")
            logger.addHandler(handler)
            try:
                for step in range(SETTLING + MEASURED + 1):
                    before = engine.traffic_report()
                    engine.backward(square_loss(engine, rank(), step))
                    engine.step()
            finally:
                logger.removeHandler(handler)
            sent, wires = engine.traffic_report().since(before).sent_bytes(), wires_for(engine.blueprint)
            weights.append(whole_weights(engine))
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    return wires, [line for line in said if "communication.gradients: auto" in line], sent


@pytest.mark.parametrize("plan", ["1", "3"])
def test_the_first_steps_are_measured(plan: str) -> None:
    (wires, said, sent), (_, other, _) = pool.run(2, measures, plan)
    assert next(iter(wires.items())) == ("full", sent)
    assert wires["gradients: int8"] < sent
    assert len(wires) == 5
    assert len(said) == 1
    assert all(name in said[0] for name in wires)
    assert not other
