"""The real engine on ranks that are threads of one process, on nodes of several."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.comm.collectives import Collectives
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.engine.build import Given
from partita.engine.engine import Engine
from partita.plan.mesh_shape import MeshShape
from tests.compression.lossless import lossless
from tests.compression.test_changes import Far
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.threads import on_threads

STAGES = [{"stage": stage} for stage in range(4)] + [{"stage": 3, "keep_gathered": True}]
HIERARCHICAL = {"stage": 3, "hierarchical": True}
NOTHING = Given(None, None, None, None)
Course = tuple[list[tuple[float, float | None]], dict[str, Tensor]]


def train(
    shape: MeshShape, zero: dict[str, Any], build: Callable[[], nn.Module] | None = None, **sections: Any
) -> list[Course]:
    """Three steps on every rank of a mesh; ranks with one data coordinate have the same model and samples."""
    seeds.start()
    model = Stack(2) if build is None else build()
    config = {"zero": zero, "clip_grad_norm": 0.1, "checkpoint": {"background": False}, **sections}
    resolved = replace(resolve(load_config(config), shape.data, "cpu", shape.data // shape.node), mesh=shape)

    def on_rank(collectives: Collectives) -> Course:
        mesh: Any = collectives.mesh
        engine = Engine(copy.deepcopy(model), resolved, mesh, NOTHING, False)
        course = []
        for step in range(3):
            loss = square_loss(engine, shape.coordinate(mesh.rank, "data"), step)
            engine.backward(loss)
            course.append((loss.item(), engine.step().grad_norm))
        with engine.gathered():
            weights = {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}
        engine.close()
        return course, weights

    return on_threads(shape, on_rank)


def same(one: Course, other: Course) -> None:
    assert one[0] == other[0]
    for name, weight in one[1].items():
        assert torch.equal(weight, other[1][name]), name


@pytest.mark.parametrize("zero", [*STAGES, HIERARCHICAL])
def test_all_stages_have_the_same_bits(zero: dict[str, Any]) -> None:
    shape = MeshShape(data=4, node=2)
    for one, other in zip(train(shape, zero), train(shape, STAGES[0]), strict=True):
        same(one, other)


@pytest.mark.parametrize(
    "shape", [MeshShape(data=4, node=2), MeshShape(data=6, node=3), MeshShape(data=6, node=2)], ids=str
)
def test_changes_between_nodes_where_nothing_is_lost(shape: MeshShape) -> None:
    """Sums inside a node first, as where each node has whole shards."""
    expected = train(shape, {"stage": 3, "replicate": "nodes"}, Far)
    with lossless("ternary"):
        got = train(shape, HIERARCHICAL, Far, communication={"parameters": "ternary"})
    for one, other in zip(got, expected, strict=True):
        same(one, other)
