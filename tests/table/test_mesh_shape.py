"""Tests of the grid of ranks: coordinates and ranks are one to one, and groups partition the ranks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import ConfigError
from partita.table.mesh_shape import AXES, DATA_PARTS, MeshShape, expand
from tests.table.meshes import mesh_shapes, places, shapes

ALL_AXES = (*AXES, *DATA_PARTS)
# Axes that one communicator may span: each at most once, with data or its parts.
COMBINATIONS = [
    tuple(axis for axis in ("pipeline", *data, "sequence", "tensor") if axis in chosen or axis in data)
    for data in ((), ("data",), ("node",), ("local",), ("node", "local"))
    for chosen in ((), ("pipeline",), ("sequence",), ("tensor",), ("sequence", "tensor"), AXES)
]


def test_every_rank_has_a_place_and_every_place_a_rank() -> None:
    num_shapes = 0
    for mesh in shapes(32):
        num_shapes += 1
        expected = places(mesh)
        assert mesh.num_ranks == len(expected)
        for rank, place in enumerate(expected):
            assert {axis: mesh.coordinate(rank, axis) for axis in ALL_AXES} == place, (mesh, rank)
    assert num_shapes > 900


def test_sizes_are_the_extents_of_the_coordinates() -> None:
    for mesh in shapes(16):
        for axis in ALL_AXES:
            assert mesh.size(axis) == 1 + max(place[axis] for place in places(mesh))
        assert mesh.size("node") * mesh.size("local") == mesh.size("data")


@given(mesh_shapes(), st.sampled_from(COMBINATIONS))
def test_groups_partition_the_ranks(mesh: MeshShape, axes: tuple[str, ...]) -> None:
    groups, where = mesh.groups(axes), places(mesh)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_ranks))
    fixed = [axis for axis in expand(AXES) if axis not in expand(axes)]
    for group in groups:
        assert len(group) == mesh.group_size(axes)
        assert len({tuple(where[rank][axis] for axis in fixed) for rank in group}) == 1
    assert len({tuple(where[group[0]][axis] for axis in fixed) for group in groups}) == len(groups)


@given(mesh_shapes(), st.sampled_from(COMBINATIONS).flatmap(st.permutations).map(tuple))
def test_a_rank_stands_in_its_group_at_its_group_index(mesh: MeshShape, axes: tuple[str, ...]) -> None:
    where = places(mesh)
    for group in mesh.groups(axes):
        assert [mesh.group_index(rank, axes) for rank in group] == list(range(len(group)))
        assert group == sorted(group, key=lambda rank: [where[rank][axis] for axis in axes])


def test_groups_come_in_the_same_order_on_every_rank() -> None:
    mesh = MeshShape(data=4, tensor=2, node=2)
    assert mesh.groups(("data",)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert mesh.groups(("local",)) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups(("node",)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups(("tensor",)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups(("data", "tensor")) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert mesh.groups(("tensor", "local")) == [[0, 2, 1, 3], [4, 6, 5, 7]]
    assert mesh.groups(()) == [[rank] for rank in range(8)]


@given(mesh_shapes())
def test_data_is_node_and_local(mesh: MeshShape) -> None:
    assert mesh.groups(("data",)) == mesh.groups(("node", "local"))
    for rank in range(mesh.num_ranks):
        assert mesh.group_index(rank, ("data",)) == mesh.group_index(rank, ("node", "local"))


def test_expand() -> None:
    assert expand(("pipeline", "data", "tensor")) == ("pipeline", "node", "local", "tensor")
    assert expand(("local",)) == ("local",)
    assert expand(()) == ()


@pytest.mark.parametrize("axis", [*AXES, "node"])
@pytest.mark.parametrize("size", [0, -1])
def test_an_axis_has_at_least_one_rank(axis: str, size: int) -> None:
    sizes: dict[str, Any] = {axis: size}
    with pytest.raises(ConfigError, match=f"mesh axis '{axis}' must have at least 1 rank; got {size}"):
        MeshShape(**sizes)


@pytest.mark.parametrize(("data", "node"), [(4, 3), (2, 4), (1, 2)])
def test_nodes_divide_the_data_axis(data: int, node: int) -> None:
    with pytest.raises(ConfigError, match=rf"data axis \({data} ranks\) cannot be split over {node} nodes evenly"):
        MeshShape(data=data, node=node)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_is_inside_the_mesh(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} is outside the mesh of 8 ranks"):
        MeshShape(data=4, tensor=2).coordinate(rank, "local")


def test_an_unknown_axis_is_named() -> None:
    message = "unknown mesh axis 'expert'; the axes are pipeline, data, sequence, tensor, node, local"
    for ask in (lambda mesh: mesh.size("expert"), lambda mesh: mesh.coordinate(0, "expert")):
        with pytest.raises(ConfigError, match=message):
            ask(MeshShape())


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        (("data",), ("data",)),
        (("node", "local"), ("data",)),
        (("local", "node"), ("local", "node")),
        (("local",), ("local",)),
        (("sequence", "tensor"), ("tensor",)),
        (("pipeline", "data", "sequence", "tensor"), ("data", "tensor")),
        (("pipeline",), ()),
    ],
)
def test_axes_that_mean_the_same_have_one_name(axes: tuple[str, ...], named: tuple[str, ...]) -> None:
    mesh = MeshShape(data=4, tensor=2, node=2)
    assert mesh.named(axes) == named == mesh.named(mesh.named(axes))
    assert mesh.groups(axes) == mesh.groups(named)


def test_a_part_of_data_that_is_all_of_it_is_data() -> None:
    assert MeshShape(data=4).named(("local",)) == ("data",)
    assert MeshShape(data=4, node=4).named(("node",)) == ("data",)
    assert MeshShape(data=4, node=4).named(("local",)) == ()


@given(mesh_shapes(), st.sampled_from([(), ("data",), ("local",), ("data", "tensor"), ("pipeline", "node")]))
def test_each_part_of_a_state_has_one_first_replica(mesh: MeshShape, shard_axes: tuple[str, ...]) -> None:
    first = [rank for rank in range(mesh.num_ranks) if mesh.is_first_replica(rank, shard_axes)]
    assert [mesh.group_index(rank, shard_axes) for rank in first] == list(range(mesh.group_size(shard_axes)))
    assert first[0] == 0
