"""The real engine on ranks that are threads of one process, on meshes with other axes than data."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from partita.checkpoint.format.stored import open_stored
from partita.comm.collectives import Collectives
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.engine.build import Given
from partita.engine.engine import Engine
from partita.plan.box import Box
from partita.plan.mesh_shape import MeshShape
from tests import seeds
from tests.fakes import on_ranks
from tests.local.training import Stack, square_loss
from tests.matrix import matrix

STAGES = [{"stage": stage} for stage in range(4)] + [{"stage": 3, "keep_gathered": True}]
HIERARCHICAL = {"stage": 3, "hierarchical": True}
NOTHING = Given(None, None, None, None)
Course = tuple[list[tuple[float, float | None]], dict[str, Tensor]]


def train(
    shape: MeshShape, zero: dict[str, Any], *, load: Path | None = None, save: Path | None = None
) -> list[Course]:
    """Three steps on every rank of a mesh; ranks with one data coordinate have the same model and samples."""
    seeds.start()
    model, config = Stack(2), {"zero": zero, "clip_grad_norm": 0.1, "checkpoint": {"background": False}}
    resolved = replace(resolve(load_config(config), shape.data, "cpu", shape.data // shape.node), mesh=shape)

    def on_rank(collectives: Collectives) -> Course:
        mesh: Any = collectives.mesh
        engine = Engine(copy.deepcopy(model), resolved, mesh, NOTHING, False)
        if load is not None:
            engine.load(load)
        course = []
        for step in range(3):
            loss = square_loss(engine, shape.coordinate(mesh.rank, "data"), step)
            engine.backward(loss)
            course.append((loss.item(), engine.step().grad_norm))
        if save is not None:
            engine.save(save)
        with engine.gathered():
            weights = {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}
        engine.close()
        return course, weights

    return on_ranks(shape, on_rank)


def same(one: Course, other: Course) -> None:
    assert one[0] == other[0]
    for name, weight in one[1].items():
        assert torch.equal(weight, other[1][name]), name


def held_in(folder: Path) -> dict[str, list[Box | None]]:
    """The boxes that a checkpoint has of each tensor."""
    tensors = open_stored(folder).tensors
    return {key: sorted((chunk.box for chunk in found.chunks), key=str) for key, found in tensors.items()}


@pytest.mark.parametrize("zero", [*STAGES, HIERARCHICAL])
def test_all_stages_have_the_same_bits(zero: dict[str, Any]) -> None:
    shape = MeshShape(data=4, node=2)
    for one, other in zip(train(shape, zero), train(shape, STAGES[0]), strict=True):
        same(one, other)


@matrix(zero=STAGES)
def test_whole_copies_along_tensor_change_nothing(zero: dict[str, Any]) -> None:
    """The mean of equal gradients is what each of them is."""
    few, many = MeshShape(data=2), MeshShape(data=2, tensor=2)
    expected = train(few, zero)
    for rank, course in enumerate(train(many, zero)):
        same(course, expected[many.coordinate(rank, "data")])


@pytest.mark.parametrize("zero", [STAGES[1], STAGES[3]])
def test_a_checkpoint_holds_each_copy_once(zero: dict[str, Any], tmp_path: Path) -> None:
    few, many = MeshShape(data=2), MeshShape(data=2, tensor=2)
    for name, shape in {"few": few, "many": many}.items():
        train(shape, zero, save=tmp_path / name)
    assert held_in(tmp_path / "few") == held_in(tmp_path / "many")
    expected = train(few, zero, load=tmp_path / "few")
    for shape in (few, many):
        for rank, course in enumerate(train(shape, zero, load=tmp_path / "many")):
            same(course, expected[shape.coordinate(rank, "data")])
