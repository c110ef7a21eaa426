"""Mesh shapes for tests, and coordinates of their ranks computed without the code under test."""

from collections.abc import Iterator
from itertools import product

from hypothesis import strategies as st

from partita.table.mesh_shape import AXES, MeshShape

Place = dict[str, int]


def shapes(max_ranks: int) -> Iterator[MeshShape]:
    """Yield every shape of up to ``max_ranks`` ranks, with every way to split its data axis over nodes."""
    for pipeline in range(1, max_ranks + 1):
        for data in range(1, max_ranks // pipeline + 1):
            for sequence in range(1, max_ranks // (pipeline * data) + 1):
                for tensor in range(1, max_ranks // (pipeline * data * sequence) + 1):
                    for node in range(1, data + 1):
                        if data % node == 0:
                            yield MeshShape(pipeline, data, sequence, tensor, node)


def places(mesh: MeshShape) -> list[Place]:
    """Return the coordinates of every rank, in rank order; the last axis varies fastest."""
    found = []
    for digits in product(*(range(getattr(mesh, axis)) for axis in AXES)):
        place = dict(zip(AXES, digits, strict=True))
        place["node"], place["local"] = divmod(place["data"], mesh.data // mesh.node)
        found.append(place)
    return found


@st.composite
def mesh_shapes(draw: st.DrawFn, max_ranks: int = 32) -> MeshShape:
    """Draw a shape of up to ``max_ranks`` ranks."""
    left, sizes = max_ranks, {}
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(st.integers(1, min(left, 8)))
        left //= sizes[axis]
    node = draw(st.sampled_from([n for n in range(1, sizes["data"] + 1) if sizes["data"] % n == 0]))
    return MeshShape(**sizes, node=node)
