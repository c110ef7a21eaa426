"""States, norms, looks and checkpoints under axes beside data, whoever applies these: here they are made by hand."""

from typing import Any

import pytest

from partita.plan.mesh_shape import MeshShape
from tests.axes import Course, Recipe, close, same, train
from tests.matrix import matrix

STAGES = [{"stage": stage} for stage in range(4)] + [{"stage": 3, "keep_gathered": True}]
MESHES = {
    "tensor 2": MeshShape(tensor=2),
    "tensor 2 x data 2": MeshShape(data=2, tensor=2),
    "tensor 3": MeshShape(tensor=3),
    "pipeline 2": MeshShape(pipeline=2),
    "pipeline 2 x data 2": MeshShape(pipeline=2, data=2),
    "pipeline 2 x tensor 2": MeshShape(pipeline=2, tensor=2),
    "all": MeshShape(pipeline=2, data=2, tensor=2),
}
FEW = ("tensor 2 x data 2", "all")


def alone(shape: MeshShape, **recipe: Any) -> Course:
    """The same steps with data alone."""
    return train(MeshShape(data=shape.data), Recipe(**recipe))[0]


@pytest.mark.parametrize("mesh", FEW)
def test_all_stages_have_the_same_bits(mesh: str) -> None:
    """And gradients, norms and weights are those of data alone, up to the order of sums."""
    shape, first = MESHES[mesh], list[Course]()
    expected = alone(shape, tied=True)
    for zero in STAGES[:4]:
        courses = train(shape, Recipe(zero, tied=True))
        first = first or courses
        for course, other in zip(courses, first, strict=True):
            same(course, other)
            close(course, expected)


@matrix(mesh=list(MESHES), zero=STAGES, tied=[False, True], accumulate=[1, 3])
def test_any_mesh_trains_as_data_alone(mesh: str, zero: dict[str, Any], tied: bool, accumulate: int) -> None:
    shape = MESHES[mesh]
    expected = alone(shape, tied=tied, accumulate=accumulate)
    for course in train(shape, Recipe(zero, tied=tied, accumulate=accumulate)):
        close(course, expected)


@matrix(zero=STAGES, data=[1, 2, 3])
def test_stages_of_untied_parameters_change_no_bit(zero: dict[str, Any], data: int) -> None:
    shape = MeshShape(pipeline=2, data=data)
    expected = alone(shape, zero=zero)
    courses = train(shape, Recipe(zero))
    assert courses[-1].losses == train(MeshShape(data=data), Recipe(zero))[-1].losses
    for course in courses:
        same(course, expected)
