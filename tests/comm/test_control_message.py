"""Control messages between ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import partita
from partita import PartitaError
from partita.comm.collectives import Collectives
from partita.comm.connections import Processes
from partita.comm.control_message import PAYLOAD_BYTES
from partita.comm.mesh import Mesh
from partita.comm.world import Rendezvous
from partita.memory.accelerator import HOST
from partita.table.mesh_shape import MeshShape
from tests.kit.models import Stack, square_loss
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, world


def collectives() -> Collectives:
    return Collectives(Mesh(MeshShape(data=world()), HOST, Processes(HOST, Rendezvous(rank(), world(), 20.0))))


def of_any_size() -> None:
    """Check tensors of every dtype, and objects of different sizes on each rank, in one message or two."""
    made = collectives()
    group = made.all_ranks
    for num in (0, 1, PAYLOAD_BYTES, PAYLOAD_BYTES + 1, 5000):
        for dtype in (torch.uint8, torch.int64, torch.float64, torch.bool):
            every = group.exchange(torch.full((num,), rank(), dtype=dtype), "a call").wait()
            expected = torch.arange(world()).to(dtype).view(-1, 1).expand(world(), num)
            assert torch.equal(every, expected)
    for num in (0, PAYLOAD_BYTES, 3000):
        assert group.exchange_objects("x" * num * rank(), "a call") == ["x" * num * r for r in range(world())]
    made.mesh.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_messages_of_any_size(num_ranks: int) -> None:
    on_ranks(num_ranks, of_any_size)


CALLS: dict[str, Callable[[partita.Engine, Path], object]] = {
    "save": lambda engine, folder: engine.save(folder),
    "mean": lambda engine, _: engine.mean(1.0),
    "clip": lambda engine, _: engine.clip_grad_norm(1.0),
    "gradient": lambda engine, _: engine.gradient(next(name for name, _ in engine.module.named_parameters())),
}


def called_on_rank_0_alone(name: str, stage: int, folder: Path) -> str:
    """Make a call on rank 0 alone, while the other ranks continue to the step. Return this rank's error."""
    config = {"zero": {"stage": stage}, "communication": {"timeout_s": 5.0}, "checkpoint": {"background": False}}
    try:
        with partita.initialize(Stack(2), config) as engine:
            if name == "clip":
                engine.backward(square_loss(engine, rank(), 0))
            if rank() == 0:
                CALLS[name](engine, folder)
            if name != "clip":
                engine.backward(square_loss(engine, rank(), 0))
            engine.step()
    except PartitaError as error:
        return str(error)
    return ""


@matrix(name=CALLS, stage=[1, 3])
def test_a_call_of_one_rank_alone_is_told(name: str, stage: int, tmp_path: Path) -> None:
    said = on_ranks(2, called_on_rank_0_alone, name, stage, tmp_path, with_group=False)
    if stage == 3 and name != "clip":  # rank 1 waits in an all-gather until the time-out
        assert "rank 1, after 0 micro-batches, gathers 'Stack (root)'" in said[0]
    else:
        assert all("the ranks are at different calls: rank 0 is at " in text for text in said), said
