"""What the axes exchange of activations is foretold, to the byte."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import partita
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.forecast.pieces import Trace
from partita.forecast.sent import activation_bytes, sent_by_axes
from partita.forecast.sized import Sized, Stage, size_model
from partita.forecast.source import Source, read_source
from partita.planner.group_units import group_units
from tests.local import pool

MICRO, MICROS = 2, 3
MODELS = {
    "gpt": "layers=4,hidden=64,heads=4,vocab=300,context=48",
    "decoder": "family=llama,layers=4,hidden=64,heads=4,kv_heads=2,vocab=300,ffn=96,context=48",
}
AXES: list[dict[str, int]] = [
    {"tensor": 2},
    {"pipeline": 2},
    {"tensor": 2, "pipeline": 2},
    {"sequence": 2},
    {"sequence": 4},
    {"sequence": 2, "tensor": 2},
    {"sequence": 2, "pipeline": 2},
]


def source(name: str) -> Source:
    return read_source(MODELS[name], 24)


def trained(name: str, config: dict[str, Any], stages: Sequence[Stage], trace: Trace) -> tuple[Any, Any]:
    """What this rank sends in its second step, by axes, and what is foretold of it."""
    given = source(name)
    with partita.initialize(given.model, config, loss_fn=lambda output, _: output) as engine:
        for _ in range(2):
            before = engine.traffic_report()
            engine.train_batch([given.batch(MICRO, "cpu") for _ in range(MICROS)])
        found = Counter[str]()
        for key, count in engine.traffic_report().since(before).rows.items():
            found[",".join(key.axes)] += count.sent_bytes
        stage = stages[engine.mesh.coordinate("pipeline")]
        assert all(activation_bytes(stage, trace)[axis] > 0 for axis in config["parallel"])
        return dict(found), dict(sent_by_axes(engine.units, stage, trace, MICROS))


def on_paper(name: str, config: dict[str, Any], world: int) -> tuple[Sized, Trace]:
    given, resolved = source(name), resolve(load_config(config), world, "cpu", world)
    sized = size_model(given, group_units(given.model, "auto"), resolved, ("none",), MICRO)
    return sized, sized.traces["none"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_activations_sent_are_those_foretold(name: str, axes: dict[str, int]) -> None:
    config = {"parallel": axes, "batch": {"micro": MICRO, "accumulate": MICROS}, "zero": {"stage": 1}}
    world = math.prod(axes.values())
    sized, trace = on_paper(name, config, world)
    stages = sized.stages(axes.get("pipeline", 1))
    for found, foretold in pool.run(world, trained, name, config, stages, trace):
        assert found == foretold


def test_a_layer_of_llama_sums_four_times() -> None:
    config = {"parallel": {"tensor": 2}, "batch": {"micro": MICRO}}
    trace = on_paper("decoder", config, 2)[1]
    block = trace.blocks[1]
    states = MICRO * 24 * 64 * 4
    assert block.forward.sent_bytes == block.backward.sent_bytes == 2 * states
    assert block.output_bytes == states
