"""Memory of a pipeline stage: its own parameters with their states, and the activations of as many micro-batches as its
schedule keeps. (Logits: ``test_tensor_training``, ``test_sequence``.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import partita
from partita.layout.off_stage import is_off_stage
from partita.layout.state_bytes import model_state_bytes
from partita.parallel.pipeline.schedule import Shape, make_schedule
from partita.parallel.pipeline.schedule_cost import simulate
from tests.kit.live_bytes import LiveBytes
from tests.kit.ranks import on_ranks
from tests.parallel import stages

MICROS, TIMEOUT_S = 6, 240
ON_THE_WAY = 2  # gradients that a stage sends back and that may still be in flight after the next forward
NAME = "llama"


@dataclass(frozen=True)
class Held:
    """Memory of one rank, in bytes.

    Attributes:
        states: the model states, as reported.
        planned: the model states, as planned.
        own: the parameters of this rank's stage.
        elsewhere: the storage on this rank of parameters of other stages.
        kept: the most that a batch had allocated when a forward ended, without parameter gradients, by schedule;
            ``one``: with a single micro-batch.
        payload: the data that one stage sends to the next for a micro-batch.
    """

    states: dict[tuple[str, str], int]
    planned: dict[tuple[str, str], int]
    own: int
    elsewhere: int
    kept: dict[str, int]
    payload: int


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
            away = sum(bytes_elsewhere(param) for param in params)
            own = sum(param.nbytes for param in params if not is_off_stage(param))
            planned = model_state_bytes(engine.units, engine.mesh.rank)
    states = [key for key, num in planned.items() if num and key[0] != "gradients"]  # a step frees the gradients
    payload = 4 * stages.WIDTH * batch["input_ids"].numel()
    return Held({key: report[key] for key in states}, {key: planned[key] for key in states}, own, away, kept, payload)


def bytes_elsewhere(param: torch.Tensor) -> int:
    """Return the bytes on this rank of a parameter's storage if the parameter belongs to another stage, else 0."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if not is_off_stage(param) or param.is_meta else param.untyped_storage().nbytes()


def most_after_forwards(engine: partita.Engine, train: Callable[[], Any]) -> int:
    pipeline, most = engine._parts.pipeline, 0
    forward = pipeline.forward

    def measured(*args: Any) -> Any:
        nonlocal most
        output = forward(*args)
        gradients = sum(param.grad.nbytes for param in engine.module.parameters() if param.grad is not None)
        most = max(most, live.total - gradients)
        return output

    with LiveBytes() as live, mock.patch.object(pipeline, "forward", measured):
        train()
    return most


def test_a_stage_holds_its_own() -> None:
    """A rank stores only its stage's states, and activations of as many micro-batches as the simulation says."""
    whole = sum(param.nbytes for param in stages.build(NAME).parameters())
    found = on_ranks(3, held, ("1f1b", "gpipe"), timeout=TIMEOUT_S)
    assert sum(one.own for one in found) == whole
    for rank, one in enumerate(found):
        assert one.elsewhere == 0
        assert one.states == one.planned
        assert one.states["parameters", "device"] < 0.6 * whole
        for order in ("1f1b", "gpipe"):
            most = simulate(make_schedule(order, Shape(3, MICROS))).max_kept_forwards[rank]
            so_many = most * one.kept["one"]
            assert 0.85 * so_many < one.kept[order] <= so_many + ON_THE_WAY * one.payload, (rank, order)
            assert one.kept["one"] > 10 * one.payload
