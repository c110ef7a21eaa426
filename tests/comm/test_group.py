"""Groups over one axis and over several: their ranks, their collectives, and the counted traffic."""

from collections.abc import Callable

import pytest
import torch

from partita import PartitaError
from partita.comm.collective_errors import shared_errors
from partita.comm.collectives import Collectives
from partita.comm.connections import Processes
from partita.comm.mesh import Mesh
from partita.comm.transport import HostTransport
from partita.comm.world import Rendezvous
from partita.errors import ConfigError
from partita.memory.accelerator import HOST
from partita.table.mesh_shape import MeshShape
from partita.table.purposes import all_purposes
from partita.table.traffic import TrafficCount, TrafficKey
from tests.kit import seeds
from tests.kit.ranks import on_ranks
from tests.kit.threads import in_rank_order, on_threads
from tests.kit.training import rank, world

DATA, TENSOR, BOTH = ("data",), ("tensor",), ("data", "tensor")
SHAPE = MeshShape(data=2, tensor=2)
# By axes and rank: the ranks of its group.
GROUPS = {
    DATA: [[0, 2], [1, 3], [0, 2], [1, 3]],
    TENSOR: [[0, 1], [0, 1], [2, 3], [2, 3]],
    BOTH: [[0, 1, 2, 3]] * 4,
    ("pipeline",): [[0], [1], [2], [3]],
}


STATES = ("parameters", "gradients")


def real(shape: MeshShape) -> Collectives:
    made = Collectives(Mesh(shape, HOST, Processes(HOST, Rendezvous(rank(), world(), 20.0))))
    made.open(list(GROUPS))
    return made


def values(of: int, num: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that rank ``of`` sends: numbers whose sum depends on the order."""
    drawn = torch.randn(num, generator=seeds.generator(of)) * 10.0**of
    return drawn.to(dtype)


def everything_moves(collectives: Collectives) -> None:
    own = collectives.mesh.rank
    for axes, ranks_of in GROUPS.items():
        ranks, group = ranks_of[own], collectives.group(axes)
        num = len(ranks)
        assert (group.size, group.index) == (num, ranks.index(own))
        assert group.exchange_objects(own, "a call") == ranks
        assert group.exchange(torch.tensor([own, 7]), "a call").wait().tolist() == [[other, 7] for other in ranks]
        buffers = [torch.full((3, 2), float(own)), torch.tensor(own)]
        group.broadcast(buffers, "buffers")
        assert [buffer.unique().tolist() for buffer in buffers] == [[ranks[0]], [ranks[0]]]
        assert group.all_reduce(torch.tensor([float(own), 1.0])).tolist() == [sum(ranks), num]
        if num == 1:  # all-gathers and reductions need several ranks
            continue
        for dtype in (torch.float32, torch.bfloat16):
            sent = [values(other, 12 * num, dtype) for other in ranks]
            whole = torch.full((12 * num * num,), torch.nan, dtype=dtype)
            group.all_gather(whole, sent[group.index]).wait()
            assert torch.equal(whole, torch.cat(sent))
            scratch = group.received_elements(12 * num, dtype.itemsize)
            for accumulate in (False, True):
                out = torch.ones(12, dtype=dtype)
                received = torch.full((scratch,), torch.nan, dtype=dtype)
                group.reduce_scatter(out, sent[group.index].clone(), received, accumulate=accumulate)
                total = in_rank_order([each.view(num, -1)[group.index] for each in sent])
                expected = torch.ones(12, dtype=dtype).add_(total) if accumulate else total.to(dtype)
                assert torch.equal(out, expected), f"{axes} {dtype} {accumulate}"


def activations_move(collectives: Collectives) -> None:
    """Check sums in rank order, small and large, and exchanges of parts with different sizes, some of them empty."""
    own = collectives.mesh.rank
    for axes in (TENSOR, ("pipeline",)):
        ranks, group = collectives.group(axes).ranks, collectives.group(axes)
        for num, dtype in ((2 * 3, torch.float32), (2 * 30_001, torch.float32), (2 * 30_001, torch.bfloat16)):
            sent = [values(other, num, dtype).view(2, -1) for other in ranks]
            kept = sent[group.index].clone()
            assert torch.equal(group.sum(sent[group.index].t(), "tensor"), in_rank_order(sent).to(dtype).t())
            assert torch.equal(sent[group.index], kept)
        shapes = [(place, 2) for place in range(group.size)]
        parts = [torch.full(shapes[place], float(own)) for place in range(group.size)]
        found = group.all_to_all(parts, [shapes[group.index]] * group.size, "sequence")
        assert [part.tolist() for part in found] == [[[other] * 2] * group.index for other in ranks]
        gathered = group.gather(parts[group.index], shapes, "tensor")
        assert parts[group.index]._version == 0, "autograd may have saved the part"
        assert [part.tolist() for part in gathered] == [[[other] * 2] * place for place, other in enumerate(ranks)]


def everything_moves_between_processes() -> None:
    for shape, check in ((SHAPE, everything_moves), (SHAPE, activations_move), (MeshShape(tensor=4), activations_move)):
        collectives = real(shape)
        check(collectives)
        collectives.mesh.close()


def test_everything_moves_between_threads() -> None:
    on_threads(SHAPE, everything_moves, *GROUPS)
    on_threads(SHAPE, activations_move, *GROUPS)
    on_threads(MeshShape(tensor=4), activations_move, TENSOR)


def channels() -> dict[tuple[str, ...], set[str]]:
    collectives = real(SHAPE)
    try:
        return {
            axes: {purpose for peer in (transport.peers or {}).values() for purpose in peer.channels}
            for axes, transport in collectives.mesh.transports.items()
            if isinstance(transport, HostTransport) and axes
        }
    finally:
        collectives.mesh.close()


def test_activations_have_connections_along_single_axes_that_are_not_data() -> None:
    """Node peers have activation channels along single axes except data; process groups have the same purposes."""
    states = set(STATES)
    for found in on_ranks(4, channels):
        assert found in (
            {axes: set() for axes in found},
            {DATA: states, TENSOR: {*states, "activations"}, BOTH: states},
        )
    assert [all_purposes(axes) for axes in (DATA, BOTH, (), ("pipeline:0,1",))] == [{*states, "control"}] * 4
    for axis in ("tensor", "sequence", "pipeline"):
        assert all_purposes((axis,)) == {*states, "activations", "control"}


def test_everything_moves_between_processes() -> None:
    on_ranks(4, everything_moves_between_processes)


def test_axes_that_mean_the_same_are_one_group() -> None:
    def groups(collectives: Collectives) -> None:
        assert collectives.group(("node", "local")) is collectives.group(DATA)
        assert collectives.group(("pipeline", "data", "sequence", "tensor")) is collectives.all_ranks
        assert collectives.group(("sequence",)) is collectives.group(())
        assert collectives.all_ranks.axes == BOTH

    on_threads(MeshShape(data=4, tensor=2, node=2), groups)


def counted(collectives: Collectives) -> dict[TrafficKey, TrafficCount]:
    group = collectives.group(DATA)
    part, sent = torch.ones(6), torch.ones(12)
    group.all_gather(torch.empty(12), part, tag=3).wait()
    group.all_gather(torch.empty(12), part, "gradients").wait()
    group.reduce_scatter(torch.empty(6), sent, torch.empty(group.received_elements(12, 4)), accumulate=False)
    group.all_reduce(torch.ones(8))
    group.broadcast([torch.ones(5), torch.ones(2, dtype=torch.bool)], "start")
    group.exchange(torch.ones(3, dtype=torch.int64), "a call").wait()
    group.exchange_objects("what is rare is not counted", "a call")
    alone = collectives.group(("pipeline",))
    alone.exchange(torch.ones(3), "a call").wait()
    alone.all_reduce(torch.ones(3))
    return collectives.meter.report().rows


def test_what_is_sent_is_counted_by_axes_and_purpose() -> None:
    for at, rows in enumerate(on_threads(SHAPE, counted, DATA)):
        assert rows == {
            TrafficKey("all_gather", DATA, "parameters"): TrafficCount(1, 24),
            TrafficKey("all_gather", DATA, "gradients"): TrafficCount(1, 24),
            TrafficKey("reduce_scatter", DATA, "gradients"): TrafficCount(1, 24),
            TrafficKey("all_reduce", DATA, "control"): TrafficCount(1, 32),
            TrafficKey("broadcast", DATA, "start"): TrafficCount(2, 22 if at < 2 else 0),
            TrafficKey("all_gather", DATA, "control"): TrafficCount(1, 24),
        }


def test_one_rank_has_the_same_calls() -> None:
    mesh = Mesh(MeshShape(), HOST, Processes(HOST, Rendezvous(0, 1, 20.0)))
    group = Collectives(mesh).all_ranks
    value = torch.arange(3)
    assert group.exchange(value, "a call").wait().tolist() == [[0, 1, 2]]
    assert group.exchange_objects(value, "a call")[0] is value
    assert group.all_reduce(value) is value
    group.broadcast([value], "buffers")
    assert group.board() is None
    assert group.watchdog() is None
    assert group.received_elements(12, 4) == 0
    mesh.close()


def failing(on: int) -> Callable[[Collectives], str]:
    """Return a function that raises on rank ``on`` and returns the error of each rank."""

    def work(collectives: Collectives) -> str:
        undone = list[int]()
        try:
            with shared_errors(collectives.all_ranks, lambda: undone.append(1)):
                if collectives.mesh.rank == on:
                    raise ConfigError("so it is")
        except ConfigError as error:
            return f"own: {error}, {undone}"
        except PartitaError as error:
            return f"{error}, {undone}"
        return "nothing"

    return work


def test_what_one_rank_meets_all_are_told() -> None:
    others = "rank 2 of the group over data, tensor failed: ConfigError: so it is, [1]"
    assert on_threads(SHAPE, failing(on=2)) == [others, others, "own: so it is, [1]", others]
    assert on_threads(SHAPE, failing(on=4)) == ["nothing"] * 4


def test_ranks_at_different_calls_are_told_so() -> None:
    def work(collectives: Collectives) -> str:
        with pytest.raises(PartitaError) as told:
            collectives.group(DATA).exchange_objects(None, f"call {collectives.mesh.rank}")
        return str(told.value)

    told = on_threads(SHAPE, work, DATA)
    assert "rank 0 is at call 0; rank 1 is at call 2" in told[0] == told[2]
    assert "rank 0 is at call 1; rank 1 is at call 3" in told[1] == told[3]


def closed() -> None:
    collectives = real(SHAPE)
    group = collectives.group(DATA)
    with pytest.raises(PartitaError, match="no process group over node, tensor"):
        collectives.mesh.transport(("node", "tensor"))
    collectives.mesh.close()
    with pytest.raises(PartitaError, match="no process group over data: the mesh is closed"):
        group.all_reduce(torch.ones(1))
    with pytest.raises(PartitaError, match="the mesh is closed"):
        collectives.open([TENSOR])


def test_a_closed_mesh_has_no_groups() -> None:
    on_ranks(4, closed)
