"""Engines on ranks that are threads of one process, on several nodes."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from partita.comm.collectives import Collectives
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.engine.build import UserArguments
from partita.engine.engine import Engine
from partita.table.mesh_shape import MeshShape
from tests.compression.lossless import lossless
from tests.compression.test_changes import Far
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.threads import on_threads
from tests.kit.training import Trained, assert_same_bits, train_engine

STAGES = [{"stage": stage} for stage in range(4)] + [{"stage": 3, "keep_gathered": True}]
HIERARCHICAL = {"stage": 3, "hierarchical": True}
NOTHING = UserArguments(None, None, None, None)


def train(
    shape: MeshShape, zero: dict[str, Any], build: Callable[[], nn.Module] | None = None, **sections: Any
) -> list[Trained]:
    """Train three steps on every rank of a mesh. Ranks with the same data coordinate have the same samples.

    Args:
        sections: further sections of the config.
    """
    seeds.start()
    model = Stack(2) if build is None else build()
    config = {"zero": zero, "clip_grad_norm": 0.1, "checkpoint": {"background": False}, **sections}
    resolved = replace(resolve(load_config(config), shape.data, "cpu", shape.data // shape.node), mesh=shape)

    def on_rank(collectives: Collectives) -> Trained:
        mesh: Any = collectives.mesh
        with Engine(copy.deepcopy(model), resolved, mesh, NOTHING) as engine:
            return train_engine(engine, square_loss, 3, data=shape.coordinate(mesh.rank, "data"), keep=())

    return on_threads(shape, on_rank)


@pytest.mark.parametrize("zero", [*STAGES, HIERARCHICAL])
def test_all_stages_have_the_same_bits(zero: dict[str, Any]) -> None:
    shape = MeshShape(data=4, node=2)
    for one, other in zip(train(shape, zero), train(shape, STAGES[0]), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(
    "shape", [MeshShape(data=4, node=2), MeshShape(data=6, node=3), MeshShape(data=6, node=2)], ids=str
)
def test_changes_between_nodes_where_nothing_is_lost(shape: MeshShape) -> None:
    """With a lossless codec, deltas between nodes train as replicas per node, which sum gradients in the same order."""
    expected = train(shape, {"stage": 3, "replicate": "nodes"}, Far)
    with lossless("ternary"):
        got = train(shape, HIERARCHICAL, Far, communication={"parameters": "ternary"})
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)
