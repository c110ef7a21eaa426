"""The interpreter of steps, on ranks in threads: every rank ends with exactly the values of the destination."""

from dataclasses import dataclass
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.compression.quantized import Quantized
from partita.kernels import codec as kernels
from partita.kernels.codecs import CODECS, Codec
from partita.sharding.interpreter import Interpreter
from partita.table.formats import FULL
from partita.table.mesh_shape import MeshShape
from partita.table.residence import BF16, BLOCK, FP32, Residence, Tier
from partita.table.state_plan import PRESETS, Encodings, Tiers, preset
from partita.table.steps import AllGather, AllReduce, ReduceScatter, Step, in_formats, in_phases, steps
from tests.kit import seeds
from tests.kit.threads import on_threads
from tests.table.interpreter import DTYPES, State

NUM_ELEMENTS = 48
INT4 = Quantized(CODECS["int4"], stochastic_rounding=True)
MESHES = [MeshShape(data=2), MeshShape(data=3), MeshShape(data=4, node=2), MeshShape(data=2, tensor=2)]
TIERS = [Tiers(), Tiers(Tier.HOST, Tier.HOST, Tier.HOST), Tiers(Tier.DISK, Tier.DISK, Tier.DISK)]
ENCODINGS = [Encodings(), Encodings(BF16), Encodings(BF16, FP32, BF16)]


def moved(src: Residence, dst: Residence, mesh: MeshShape, before: float | None = None) -> tuple[list[Tensor], State]:
    """Move a random state from ``src`` to ``dst``. Returns the target of each rank, and the state.

    Args:
        before: the initial value of the target, to which the state is added; None: the target is overwritten.
    """
    state = State.random(src, NUM_ELEMENTS, mesh)
    held, ops = state.held(src, mesh), steps(src, dst, mesh)

    def work(collectives: Collectives) -> Tensor:
        interpreter = Interpreter(collectives)
        source = torch.from_numpy(held[collectives.mesh.rank].values.copy()).to(DTYPES[src.encoding.name])
        size = dst.num_elements(NUM_ELEMENTS, mesh)
        target = torch.full((size,), float("nan") if before is None else before, dtype=DTYPES[dst.encoding.name])
        scratch = torch.empty(interpreter.scratch_bytes(ops, NUM_ELEMENTS, target.itemsize), dtype=torch.uint8)
        interpreter.run(ops, source, target, accumulate=before is not None, scratch=scratch.view(target.dtype))
        return target

    return on_threads(mesh, work, *(op.axes for op in ops if hasattr(op, "axes"))), state


def moves(name: str, encodings: Encodings, tiers: Tiers, mesh: MeshShape) -> list[tuple[Residence, Residence]]:
    """Return the moves (source, destination) of a row's states that need at least one step."""
    row = preset(name, encodings, tiers, mesh)
    collected = Residence((), row.grad_arrival.partial_axes, row.grad_step.encoding)
    parameters = [(row.param_stored, row.param_compute), (row.param_compute, row.param_between)]
    back = [(row.param_between, row.param_compute), (row.master, row.param_stored)]
    gradients = [(collected, row.grad_step), (row.grad_arrival, row.grad_step)]
    return [(src, dst) for src, dst in (*parameters, *back, *gradients) if steps(src, dst, mesh)]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_way_of_the_table(name: str, mesh: MeshShape) -> None:
    for encodings in ENCODINGS:
        for tiers in TIERS:
            for src, dst in moves(name, encodings, tiers, mesh):
                got, state = moved(src, dst, mesh)
                for values, held in zip(got, state.after(src, dst, mesh), strict=True):
                    expected = torch.from_numpy(held.values).to(values.dtype)
                    if _reduces_twice(src, dst, mesh) and dst.encoding == BF16:  # the first sum is rounded
                        torch.testing.assert_close(values, expected, rtol=2**-7, atol=2**-6)
                    else:
                        assert values.tolist() == expected.tolist(), (src, dst)


def _reduces_twice(src: Residence, dst: Residence, mesh: MeshShape) -> bool:
    return sum(isinstance(op, ReduceScatter) for op in in_phases(steps(src, dst, mesh))) > 1


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("mesh", [MeshShape(), *MESHES], ids=str)
def test_what_arrives_is_added(mesh: MeshShape, tier: Tier) -> None:
    is_added(Residence((), ("data",)), Residence(("data",), (), FP32, tier), mesh)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_the_last_of_several_sums_is_added(tier: Tier) -> None:
    is_added(Residence((), ("data",)), Residence(("local", "node"), (), FP32, tier), MeshShape(data=4, node=2))


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("mesh", [MeshShape(data=4, node=2), MeshShape(data=6, node=3)], ids=str)
def test_parts_are_gathered_in_turn(mesh: MeshShape, tier: Tier) -> None:
    src, dst = Residence(("local", "node")), Residence((), (), BF16, tier)
    assert sum(isinstance(op, AllGather) for op in steps(src, dst, mesh)) == 2
    got, state = moved(src, dst, mesh)
    for values, expected in zip(got, state.after(src, dst, mesh), strict=True):
        assert values.double().tolist() == expected.values.tolist()


def test_sums_in_turn_are_rounded_by_other_random_numbers() -> None:
    """Consecutive sums are rounded with different random numbers; with the same ones the second sum would be biased."""
    exact = steps(Residence((), ("data",)), Residence(("local", "node")), MeshShape(data=4, node=2))
    ops = in_formats(exact, INT4, FULL)
    drawn = dict[int, set[int | None]]()

    def encode(codec: Codec, values: Tensor, codes: Tensor, *, seed: int | None = None, **how: object) -> None:
        drawn.setdefault(values.numel(), set()).add(seed)
        codes.zero_()

    def work(collectives: Collectives) -> None:
        interpreter = Interpreter(collectives, seed=3)
        scratch = torch.empty(interpreter.scratch_bytes(ops, 4 * BLOCK, 4), dtype=torch.uint8)
        interpreter.run(ops, torch.ones(4 * BLOCK), torch.empty(BLOCK), scratch=scratch)

    with mock.patch.object(kernels, "encode", encode):
        on_threads(MeshShape(data=4, node=2), work, ("local",), ("node",))
    first, second = drawn[2 * BLOCK], drawn[BLOCK]
    assert len(first) == len(second) == 2
    assert not first & second


def is_added(src: Residence, dst: Residence, mesh: MeshShape) -> None:
    got, state = moved(src, dst, mesh, before=3.0)
    for values, expected in zip(got, state.after(src, dst, mesh), strict=True):
        assert values.double().tolist() == (expected.values + 3.0).tolist()


def test_an_all_reduce_is_two_phases() -> None:
    """An all-reduce in two phases gives the same bits as at once, and each rank's shard of the sum in between."""
    mesh, whole = MeshShape(data=2), (AllReduce(("data",)),)
    first, second = in_phases(whole)

    def work(collectives: Collectives) -> tuple[Tensor, Tensor, Tensor]:
        interpreter, rank = Interpreter(collectives), collectives.mesh.rank
        sent = torch.rand(8, generator=seeds.generator(rank))
        at_once, scratch = torch.empty(8), torch.empty(4)
        interpreter.run(whole, sent.clone(), at_once, scratch=scratch)
        parts = torch.empty(8)
        mine = parts.view(2, -1)[rank]
        interpreter.run([first], sent, mine, scratch=scratch)
        between = mine.clone()
        interpreter.run([second], mine, parts)
        return at_once, parts, between

    results = on_threads(mesh, work, ("data",))
    assert all(torch.equal(at_once, parts) for at_once, parts, _ in results)
    assert torch.equal(torch.cat([between for _, _, between in results]), results[0][0])


def test_ranks_that_gather_side_by_side() -> None:
    """Several all-gathers with different tags can be started before the first one is finished."""

    def work(collectives: Collectives) -> list[list[float]]:
        interpreter, rank = Interpreter(collectives), float(collectives.mesh.rank)
        rests, whole = Residence(("data",)), Residence()
        targets = [torch.zeros(2) for _ in range(3)]
        ops = steps(rests, whole, MeshShape(data=2))
        tags = [0, 1, 2] if rank == 0 else [2, 1, 0]  # a gather that ends before the next one begins would wait forever
        begun = [interpreter.begin(ops, torch.tensor([rank + tag]), targets[tag], tag=tag) for tag in tags]
        for gather in begun:
            gather.finish()
        return [target.tolist() for target in targets]

    assert on_threads(MeshShape(data=2), work, ("data",)) == [[[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]] * 2


@dataclass(frozen=True)
class Shuffle:
    """An operation that the interpreter does not know."""


def test_an_unknown_operation_is_named() -> None:
    def work(collectives: Collectives) -> None:
        unknown: Step = Shuffle()  # type: ignore[assignment]
        with pytest.raises(NotImplementedError, match=r"Shuffle\(\)"):
            Interpreter(collectives).begin([unknown], torch.zeros(2), torch.ones(2))

    on_threads(MeshShape(), work)


def test_phases_keep_the_order() -> None:
    for name in PRESETS:
        row = preset(name)
        for src, dst in pairwise([row.grad_arrival, row.grad_between, row.grad_step]):
            ops = steps(src, dst, MeshShape(data=2))
            assert [op for op in in_phases(ops) if op in ops] == [op for op in ops if not isinstance(op, AllReduce)]
