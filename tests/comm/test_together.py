"""Memory shortfall: ranks of a node share its memory; each rank has its own device."""

import socket
from unittest import mock

from partita.comm.collective_errors import MemoryShortfall, find_memory_shortfall
from partita.comm.collectives import Collectives
from partita.table.mesh_shape import MeshShape
from tests.kit.threads import on_threads

NODE = f"node {socket.gethostname()}"
DATA = ("data",)


def lacking(needed: list[int], free: list[int], *, shared: bool) -> list[MemoryShortfall | None]:
    """Return each rank's shortfall."""

    def ask(collectives: Collectives) -> MemoryShortfall | None:
        group = collectives.group(DATA)
        return find_memory_shortfall(needed[group.index], free[group.index], group, "a test", shared=shared)

    return on_threads(MeshShape(data=len(needed)), ask, DATA)


def test_ranks_of_a_node_share_its_memory() -> None:
    assert lacking([3, 4], [7, 7], shared=True) == [None] * 2
    assert lacking([3, 4], [9, 6], shared=True) == [MemoryShortfall(NODE, 7, 6)] * 2, "the least that a rank has seen"


def test_a_device_is_its_ranks_own() -> None:
    assert lacking([3, 4, 5], [3, 4, 5], shared=False) == [None] * 3
    assert lacking([3, 4, 5], [9, 3, 2], shared=False) == [MemoryShortfall("rank 1", 4, 3)] * 3


def test_nodes_are_told_apart() -> None:
    with mock.patch("socket.gethostname", side_effect=["one", "other"]):
        assert lacking([3, 4], [5, 5], shared=True) == [None] * 2
