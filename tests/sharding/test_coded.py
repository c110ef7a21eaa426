"""Sums and gathers in codes, on ranks in threads: right on average, and no rank's error is another's."""

import pytest
import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import BLOCK
from partita.plan.steps import AllGather, ReduceScatter
from partita.plan.wire import CODECS, FULL, Wire
from partita.sharding.movement import Movement, finish_all
from tests import seeds
from tests.fakes import on_ranks

NUM = 16 * BLOCK
AXES = [("data",), ("node",), ("local",)]
INT4 = Wire(codec=CODECS["int4"], unbiased=True)
MESHES = [MeshShape(data=2), MeshShape(data=4), MeshShape(data=4, node=2)]


def summed(mesh: MeshShape, wire: Wire, seed: int, values: Tensor | None = None) -> Tensor:
    """The sum over the ranks of their ``values`` ``[ranks, NUM]``, whole."""
    given = torch.randn(mesh.data, NUM, generator=seeds.generator()) if values is None else values
    ops = (ReduceScatter(("data",), wire),)

    def work(collectives: Collectives) -> Tensor:
        movement, out = Movement(collectives, seed), torch.empty(NUM // mesh.data)
        room = torch.empty(movement.scratch_bytes(ops, NUM, 4), dtype=torch.uint8).view(torch.float32)
        finish_all(movement.begin(ops, given[collectives.mesh.rank], out, received=room))
        return out

    return torch.cat(on_ranks(mesh, work, *AXES))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_sums_are_right_on_average(mesh: MeshShape) -> None:
    exact, num = summed(mesh, FULL, 0), 40
    errors = torch.stack([summed(mesh, INT4, seed) - exact for seed in range(num)])
    size = errors.square().mean().sqrt()
    assert 0.05 < size < 0.6
    # Of so many means the largest is within five of their standard deviations.
    assert errors.mean(0).abs().max() < 6 * errors.square().mean(0).max().sqrt() / num**0.5
    assert errors.mean().abs() < 6 * size / (num * NUM) ** 0.5


def test_errors_of_ranks_do_not_add_up() -> None:
    """Of equal values they would, were they rounded alike: the variance of the sum is that of one rank, times those
    that send.
    """
    values = torch.randn(1, NUM, generator=seeds.generator())
    variance = {}
    for ranks in (2, 4):
        same = values.expand(ranks, -1)
        errors = [summed(MeshShape(data=ranks), INT4, seed, same) - ranks * values[0] for seed in range(20)]
        variance[ranks] = torch.stack(errors).square().mean().item()
    assert variance[4] / variance[2] == pytest.approx(3, rel=0.1)


def test_all_ranks_gather_the_same_bits() -> None:
    mesh, wire = MeshShape(data=4), Wire(codec=CODECS["int8"])
    values = torch.randn(NUM, generator=seeds.generator())
    ops = (AllGather(("data",), wire),)

    def work(collectives: Collectives) -> Tensor:
        movement, whole = Movement(collectives), torch.empty(NUM)
        room = torch.empty(movement.scratch_bytes(ops, NUM // 4, 4), dtype=torch.uint8)
        source = values.view(4, -1)[collectives.mesh.rank]
        finish_all(movement.begin(ops, source, whole, received=room))
        return whole

    first, *others = on_ranks(mesh, work, *AXES)
    assert all(torch.equal(first, other) for other in others)
    assert 0 < (first - values).abs().max() < 0.5 / 127 * values.abs().max() * 1.001
