"""What a stage of a pipeline holds: its own parameters and their states, and activations of as many micro-batches as
the order of its work keeps. (Logits: ``test_tensor_training``, ``test_sequence``.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

import partita
from partita.memory.ledger import STATES
from partita.parallel.pipeline.schedule import Shape, make_schedule
from partita.parallel.pipeline.simulate import simulate
from partita.planner.elsewhere import is_elsewhere
from partita.planner.memory import model_state_bytes
from tests.live_bytes import LiveBytes
from tests.local import pool
from tests.parallel import stages

MICROS, TIMEOUT_S = 6, 240
NAME = "llama"


@dataclass(frozen=True)
class Held:
    """On a rank: bytes of its model states, and of these by the plan; bytes of the parameters' memory, of which
    ``elsewhere`` those that other stages hold; and by order the most bytes that forwards had made and that were alive
    when one ended.
    """

    states: dict[tuple[str, str], int]
    planned: dict[tuple[str, str], int]
    own: int
    elsewhere: int
    kept: dict[str, int]


def held(orders: tuple[str, ...]) -> Held:
    kept, batch = {}, stages.batch(NAME, 0)
    for order, micros in [*((order, MICROS) for order in orders), ("one", 1)]:
        schedule = {} if order == "one" else {"schedule": order}
        config = {"parallel": {"pipeline": 3, **schedule}, "batch": {"accumulate": micros}, "zero": {"stage": 3}}
        with partita.initialize(stages.build(NAME), config) as engine:
            engine.train_batch([batch] * micros)
            kept[order] = most_after_forwards(engine, lambda: engine.train_batch([batch] * micros))
            report = engine.memory_report().held
            params = list(engine.module.parameters())
            bytes_of = [param.untyped_storage().nbytes() * is_elsewhere(param) for param in params]
            own = sum(param.nbytes for param in params if not is_elsewhere(param))
            planned = model_state_bytes(engine.units, engine.mesh.rank)
    states = {key: num for key, num in report.items() if key[0] in STATES and num}
    return Held(states, {key: num for key, num in planned.items() if num}, own, sum(bytes_of), kept)


def most_after_forwards(engine: partita.Engine, train: Callable[[], Any]) -> int:
    pipeline, most = engine._parts.pipeline, 0
    forward = pipeline.forward

    def measured(*args: Any) -> Any:
        nonlocal most
        output = forward(*args)
        most = max(most, live.total)
        return output

    with LiveBytes() as live, mock.patch.object(pipeline, "forward", measured):
        train()
    return most


def test_a_stage_holds_its_own() -> None:
    """GPipe keeps what all micro-batches left, 1F1B on each rank as many as the simulation says."""
    whole = sum(param.nbytes for param in stages.build(NAME).parameters())
    found = pool.run(3, held, ("1f1b", "gpipe"), timeout=TIMEOUT_S)
    assert sum(one.own for one in found) == whole
    for rank, one in enumerate(found):
        assert one.elsewhere == 0
        assert one.states == one.planned
        assert one.states["parameters", "device"] < 0.6 * whole
        for order in ("1f1b", "gpipe"):
            most = simulate(make_schedule(order, Shape(3, MICROS))).most_kept[rank]
            assert one.kept[order] == pytest.approx(most * one.kept["one"], rel=0.02), (rank, order)
