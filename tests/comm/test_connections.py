"""Process groups: their number, the ranks that create them, and torch's DeviceMesh of the mesh."""

from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import partita
from partita import PartitaError
from partita.comm.connections import Processes
from partita.comm.mesh import Mesh
from partita.comm.simulated import Requests, SimulatedRanks
from partita.comm.transport import DeviceTransport, Transport
from partita.engine.build import along_axes
from partita.memory.accelerator import HOST
from partita.table.mesh_shape import AXES, MeshShape
from partita.table.state_plan import preset
from tests.kit.models import CASES
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights, world

STAGES = ("ddp", "zero1", "zero2", "zero3", "zero3-kept", "zero3-once")
BETWEEN_NODES = {"hierarchical": 11, "hierarchical-changes": 12, "hsdp": 12}


class Counting(Processes):
    """Connections that count groups in place of creating them."""

    def __init__(self, rank: int, num_ranks: int, *, by_members: bool = True) -> None:
        self.rank, self.num_ranks, self.timeout_s = rank, num_ranks, 1.0
        self._device, self._backend, self._within_node = HOST, "gloo", "network"
        self._on_device, self.through_host = DeviceTransport, False
        self._names = "name" if by_members else ""
        self.names, self._num_made, self._world = list[str](), 0, None

    def _agreed_names(self, all_ranks: Transport) -> str:
        return self._names

    def _new_group(self, ranks: list[int], backend: str, name: str) -> Any:
        self.names.append(name)
        return object()


def connected(num_data: int, rank: int, *, by_members: bool = True, row: str = "zero1") -> int:
    """Return the number of groups that a rank of a mesh creates for an engine."""
    shape = MeshShape(pipeline=4, data=num_data, tensor=4, node=2 if row in BETWEEN_NODES else 1)
    counting = Counting(rank, shape.num_ranks, by_members=by_members)
    mesh = Mesh(shape, HOST, counting)
    mesh.open(along_axes(partita.Config()))
    mesh.open(preset(row, mesh=shape).groups(shape))
    mesh.transports.clear()
    assert not by_members or len(set(counting.names)) == len(counting.names)
    return len(counting.names)


def test_calls_do_not_grow_with_the_number_of_ranks() -> None:
    few, many = connected(2, 0), connected(32, 0)
    assert few == many <= 12
    assert {connected(32, rank) for rank in (0, 5, 511)} == {many}
    assert connected(32, 0, by_members=False) > 500


@pytest.mark.parametrize(("row", "most"), [*((row, 10) for row in STAGES), *BETWEEN_NODES.items()])
def test_a_rank_is_in_few_groups(row: str, most: int) -> None:
    """One of 512 ranks is in at most 12 groups; rows that split data over nodes use two more combinations of axes."""
    assert connected(32, 0, row=row) == most <= 12


def uses_device_mesh(folder: Path) -> None:
    parallel = {"tensor": 2} if world() > 1 else {}
    model = CASES["llama"].build()
    with partita.initialize(model, {"zero": {"stage": 1}, "parallel": parallel}) as engine:
        mesh = engine.mesh.device_mesh
        assert mesh is engine.mesh.device_mesh
        assert mesh.mesh_dim_names == AXES
        assert mesh.shape == tuple(engine.mesh.size(axis) for axis in AXES)
        assert list(mesh.get_coordinate() or ()) == [engine.mesh.coordinate(axis) for axis in AXES]
        whole = torch.arange(16.0).view(8, 2)
        both = mesh["data", "tensor"]
        placed = distribute_tensor(whole, both, [Shard(0), Replicate()])
        assert placed.to_local().equal(whole.chunk(engine.mesh.size("data"))[engine.mesh.coordinate("data")])
        summed = DTensor.from_local(torch.full((2,), float(rank())), both, [Partial(), Partial()]).full_tensor()
        assert summed.tolist() == [sum(range(world()))] * 2
        for batch in islice(CASES["llama"].batches(2), 2):  # the engine uses other groups
            engine.backward(CASES["llama"].loss(engine(**batch)))
            total = torch.ones(1)
            dist.all_reduce(total, group=mesh["data"].get_group())
            assert total.item() == engine.mesh.size("data")
            engine.step()
        checkpoint.save({"placed": placed, "step": 3}, checkpoint_id=folder)
        state = {"placed": distribute_tensor(torch.zeros_like(whole), both, [Shard(0), Replicate()]), "step": 0}
        checkpoint.load(state, checkpoint_id=folder)
        assert cast(DTensor, state["placed"]).full_tensor().equal(whole)
        assert state["step"] == 3
    with pytest.raises(PartitaError, match="the mesh is closed"):
        _ = engine.mesh.device_mesh


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_mesh_as_torch_describes_it(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, uses_device_mesh, tmp_path)


def test_one_process_has_it_too(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    uses_device_mesh(tmp_path)
    assert not dist.is_initialized()


def engines_in_turn() -> list[list[float]]:
    """Train with three engines in turn, whose groups have the same ranks as those of the closed engine before. Only
    ranks 0 and 1 have created a group of their own. Return the sums of each engine's weights.
    """
    if rank() < 2:
        own = dist.new_group([0, 1], timeout=timedelta(seconds=20), use_local_synchronization=True)
        dist.barrier(group=own)
    found = []
    for plan in ("3", "1", "3"):
        config = {"zero": ZERO[plan], "parallel": {"tensor": 2}, "communication": {"timeout_s": 20.0}}
        with partita.initialize(CASES["llama"].build(), config) as engine:
            batch = next(iter(CASES["llama"].batches(2)))
            engine.backward(CASES["llama"].loss(engine(**batch)))
            assert engine.step().stepped
            assert engine.mesh.device_mesh["data"].size() == 2
            found.append([value.sum().item() for value in whole_weights(engine).values()])
    assert found[0] == found[2]
    return found


def test_engines_in_turn_and_groups_of_some_ranks() -> None:
    first, *others = on_ranks(4, engines_in_turn)
    assert all(other == first for other in others)


def test_a_simulated_rank_has_none() -> None:
    with pytest.raises(PartitaError, match="a simulated rank has no process groups"):
        SimulatedRanks(0, 2, Requests()).device_mesh(MeshShape(data=2))
