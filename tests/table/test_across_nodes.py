"""Tests of groups that span nodes, and of the elements that each axis sends."""

import pytest

from partita.table.across_nodes import crossing_tokens, needless_crossings, sent_elements
from partita.table.mesh_shape import MeshShape


def found(mesh: MeshShape, ranks_per_node: int | None) -> list[tuple[str, int, int, int, tuple[int, ...]]]:
    crossings = needless_crossings(mesh, ranks_per_node)
    return [(c.axis, c.num_groups, c.num_crossing, c.num_nodes, c.sizes) for c in crossings]


def test_what_lies_within_nodes_is_not_mentioned() -> None:
    assert found(MeshShape(pipeline=2, data=2, tensor=4), 4) == []
    assert found(MeshShape(data=2, sequence=2, tensor=4), 8) == []
    assert found(MeshShape(data=16), 4) == []
    assert found(MeshShape(tensor=8), 8) == []
    assert found(MeshShape(tensor=8), None) == []


def test_groups_that_span_nodes() -> None:
    assert found(MeshShape(data=3, tensor=4), 6) == [("tensor", 3, 1, 2, (1, 2))]
    assert found(MeshShape(tensor=8), 4) == [("tensor", 1, 1, 2, (1, 2, 4))]
    assert found(MeshShape(data=2, sequence=3, tensor=2), 4) == []  # six ranks never fit into a node of four
    assert found(MeshShape(data=4, sequence=3), 4) == [("sequence", 4, 2, 2, (1,))]


def test_the_warning_has_the_figures() -> None:
    (crossing,) = needless_crossings(MeshShape(data=3, tensor=4), 6)
    assert str(crossing) == (
        "parallel.tensor: 4 with 6 ranks on each node: 1 of 3 groups span up to 2 nodes, so each layer communicates "
        "over the network; with parallel.tensor: 1 or 2 none would. Across nodes, data sends less than tensor from "
        "3 x width tokens per replica and step on, and pipeline less than both where a stage has many layers"
    )


@pytest.mark.parametrize("size", [2, 3, 8])
def test_tensor_sends_more_than_data_above_three_times_the_width(size: int) -> None:
    width = 128
    tokens = crossing_tokens(width)
    assert tokens == 3 * width
    assert sent_elements("tensor", size, tokens, width) == sent_elements("data", size, tokens, width)
    assert sent_elements("tensor", size, tokens + 1, width) > sent_elements("data", size, tokens + 1, width)
    assert sent_elements("pipeline", size, tokens, width) < sent_elements("data", size, tokens, width)
