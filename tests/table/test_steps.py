"""Tests of the operations between residences: after them, every rank of an interpreter holds the expected values."""

from dataclasses import fields
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.table.mesh_shape import MeshShape, expand
from partita.table.residence import BF16, ENCODINGS, FP16, FP32, Residence, Tier
from partita.table.state_plan import PRESETS, Encodings, StatePlan, preset
from partita.table.steps import AllGather, AllReduce, Copy, Encode, Read, ReduceScatter, Slice, Step, Write, steps
from tests.table.interpreter import State, run
from tests.table.meshes import mesh_shapes

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
COMMUNICATION = (AllGather, ReduceScatter, AllReduce)
PARTS = ("pipeline", "node", "local", "sequence", "tensor")


def check(src: Residence, dst: Residence, mesh: MeshShape, num_elements: int) -> tuple[Step, ...]:
    """Run the steps, compare every rank's values with those expected in ``dst``, and return the steps."""
    ops = steps(src, dst, mesh)
    state = State.random(src, num_elements, mesh)
    held = run(ops, state.held(src, mesh), mesh)
    for rank, (got, expected) in enumerate(zip(held, state.after(src, dst, mesh), strict=True)):
        assert (got.encoding, got.tier) == (expected.encoding, expected.tier), (src, dst, ops)
        assert got.values.shape == expected.values.shape, (rank, src, dst, ops)
        assert (got.values == expected.values).all(), (rank, src, dst, ops)
    check_order(ops, src, dst)
    check_nothing_is_wasted(ops)
    return ops


def check_order(ops: tuple[Step, ...], src: Residence, dst: Residence) -> None:
    """Assert that communication uses the destination's encoding, and that each tier is entered and left once."""
    encoding = src.encoding
    for op in ops:
        if isinstance(op, Encode):
            encoding = op.encoding
        elif isinstance(op, COMMUNICATION):
            assert encoding == dst.encoding, ops
    num = {kind: sum(isinstance(op, kind) for op in ops) for kind in (Encode, Copy, Read, Write)}
    assert num[Encode] == (src.encoding != dst.encoding)
    assert num[Read] == (bool(ops) and src.tier is DISK)
    assert num[Write] == (bool(ops) and dst.tier is DISK)
    crosses = any(isinstance(op, COMMUNICATION) for op in ops) or DEVICE in (src.tier, dst.tier)
    assert num[Copy] == (((src.tier is not DEVICE) + (dst.tier is not DEVICE)) if crosses and ops else 0)


def check_nothing_is_wasted(ops: tuple[Step, ...]) -> None:
    """Assert that no axis is gathered and then sliced, none is reduced twice, and slices come as early as possible."""
    reduced = [axis for op in ops if isinstance(op, ReduceScatter | AllReduce) for axis in expand(op.axes)]
    assert len(set(reduced)) == len(reduced), ops
    gathers = [number for number, op in enumerate(ops) if isinstance(op, AllGather)]
    assert all(after == before + 1 for before, after in pairwise(gathers)), ops
    for before, op in pairwise(ops):
        if isinstance(op, Slice | AllGather | ReduceScatter) and type(before) is type(op):  # else they would be one
            outer, inner = (op, before) if isinstance(op, AllGather) else (before, op)
            assert isinstance(inner, Slice | AllGather | ReduceScatter)
            assert PARTS.index(expand(outer.axes)[-1]) > PARTS.index(expand(inner.axes)[0]), ops
        if isinstance(before, AllGather) and isinstance(op, Slice):
            assert expand(before.axes)[0] != expand(op.axes)[0], ops
        assert not (isinstance(op, Slice) and isinstance(before, Encode | AllReduce)), ops


# ------------------------------------------------------------------------------------- all pairs of a row's residences

MESHES = [
    MeshShape(),
    *(MeshShape(data=d, node=node) for d, node in [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4), (6, 3), (8, 2)]),
    MeshShape(data=2, tensor=2),
    MeshShape(pipeline=2, data=4, node=2),
    MeshShape(pipeline=2, data=2, sequence=2, tensor=2, node=2),
]
TABLE_ENCODINGS = [Encodings(), Encodings(BF16), Encodings(FP16, FP32, FP16), Encodings(BF16, FP32, BF16, FP32)]


def columns(row: StatePlan) -> list[Residence]:
    return [value for f in fields(row) if isinstance(value := getattr(row, f.name), Residence)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_pair_of_columns_of_every_row(name: str) -> None:
    for mesh, encodings in product(MESHES, TABLE_ENCODINGS):
        residences = list(dict.fromkeys(columns(preset(name, encodings))))
        for src, dst in product(residences, residences):
            if active(dst.partial_axes, mesh) - active(src.partial_axes, mesh):
                with pytest.raises(ValueError, match="cannot be undone"):
                    steps(src, dst, mesh)
            else:
                ops = check(src, dst, mesh, 4 * mesh.data)
                assert src != dst or not ops


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("encodings", TABLE_ENCODINGS)
def test_alone_nothing_moves_but_encodings_change(name: str, encodings: Encodings) -> None:
    for src, dst in product(columns(preset(name, encodings)), repeat=2):
        expected = () if src.encoding == dst.encoding else (Encode(dst.encoding),)
        assert steps(src, dst, MeshShape()) == expected


def active(axes: tuple[str, ...], mesh: MeshShape) -> set[str]:
    return {axis for axis in expand(axes) if mesh.size(axis) > 1}


# ------------------------------------------------------------------------------------------ random pairs of residences


@st.composite
def residences(draw: st.DrawFn) -> Residence:
    """Draw any residence: data or its parts, axes in any order, any tier and encoding."""
    parts = draw(st.sampled_from([PARTS, ("pipeline", "data", "sequence", "tensor")]))
    axes = draw(st.permutations(parts))
    num_shard = draw(st.integers(0, len(axes)))
    num_partial = draw(st.integers(0, len(axes) - num_shard))
    shard, partial = tuple(axes[:num_shard]), tuple(axes[num_shard : num_shard + num_partial])
    return Residence(shard, partial, draw(st.sampled_from([FP32, BF16, FP16])), draw(st.sampled_from(Tier)))


@given(mesh_shapes(max_ranks=16), residences(), residences())
@settings(max_examples=400)
def test_any_two_residences(mesh: MeshShape, src: Residence, dst: Residence) -> None:
    if active(dst.partial_axes, mesh) <= active(src.partial_axes, mesh):
        check(src, dst, mesh, 2 * mesh.num_ranks)
    else:
        with pytest.raises(ValueError, match=r"a sum over .* cannot be undone"):
            steps(src, dst, mesh)


@given(mesh_shapes(max_ranks=16), residences(), residences(), st.data())
@settings(max_examples=300)
def test_any_sum(mesh: MeshShape, src: Residence, dst: Residence, data: st.DataObject) -> None:
    """Random pairs of residences in which the destination is partial only over axes of the source."""
    kept = data.draw(st.sets(st.sampled_from(src.partial_axes))) if src.partial_axes else set()
    partial = tuple(axis for axis in src.partial_axes if axis in kept)
    shard = tuple(axis for axis in expand(dst.shard_axes) if axis not in expand(partial))
    check(src, Residence(shard, partial, dst.encoding, dst.tier), mesh, 2 * mesh.num_ranks)


@given(mesh_shapes(max_ranks=16), residences())
def test_staying_is_nothing(mesh: MeshShape, residence: Residence) -> None:
    assert steps(residence, residence, mesh) == ()


@given(mesh_shapes(max_ranks=16), residences())
def test_data_and_its_parts_are_the_same(mesh: MeshShape, residence: Residence) -> None:
    written = Residence(
        expand(residence.shard_axes), expand(residence.partial_axes), residence.encoding, residence.tier
    )
    assert steps(residence, written, mesh) == ()
    for other in (Residence(), Residence(("data",)), Residence(("local",), tier=HOST)):
        if not residence.partial_axes:
            assert steps(residence, other, mesh) == steps(written, other, mesh)
            assert steps(other, residence, mesh) == steps(other, written, mesh)


# ------------------------------------------------------------------------------------------------------- examples

LOCAL, NODE, DATA, TENSOR, SEQUENCE = ("local",), ("node",), ("data",), ("tensor",), ("sequence",)
NODES = MeshShape(data=4, node=2)
GRID = MeshShape(data=4, sequence=2, tensor=2, node=2)

MOVES: dict[str, tuple[Residence, Residence, MeshShape, tuple[Step, ...]]] = {
    "gather": (Residence(DATA), Residence(), NODES, (AllGather(DATA),)),
    "gather inside the node": (Residence(LOCAL), Residence(), NODES, (AllGather(LOCAL),)),
    "keep the node's shard": (Residence(), Residence(LOCAL), NODES, (Slice(LOCAL),)),
    "from the shard to the node's": (Residence(DATA), Residence(LOCAL), NODES, (AllGather(DATA), Slice(LOCAL))),
    "from the node's shard": (Residence(LOCAL), Residence(DATA), NODES, (AllGather(LOCAL), Slice(DATA))),
    "from data to its outer part": (Residence(DATA), Residence(NODE), NODES, (AllGather(LOCAL),)),
    "finer": (Residence(TENSOR), Residence((*TENSOR, *DATA)), GRID, (Slice(DATA),)),
    "coarser": (Residence((*TENSOR, *DATA)), Residence(TENSOR), GRID, (AllGather(DATA),)),
    "another order": (Residence((*TENSOR, *DATA)), Residence((*DATA, *TENSOR)), GRID, (
        AllGather(DATA), AllGather(TENSOR), Slice((*DATA, *TENSOR)))),
    "a node's part to whole": (Residence((*LOCAL, *NODE)), Residence(), NODES, (AllGather(NODE), AllGather(LOCAL))),
    "sum to parts of a node's": (Residence((), DATA), Residence((*LOCAL, *NODE)), NODES, (
        ReduceScatter(LOCAL), ReduceScatter(NODE))),
    "one node: local is data": (Residence(LOCAL), Residence(), MeshShape(data=4), (AllGather(DATA),)),
    "one rank a node: local is nothing": (Residence(LOCAL), Residence(), MeshShape(data=4, node=4), ()),
    "sum": (Residence((), DATA), Residence(), NODES, (AllReduce(DATA),)),
    "sum to shards": (Residence((), DATA), Residence(DATA), NODES, (ReduceScatter(DATA),)),
    "sum over nodes": (Residence((), NODE), Residence(), NODES, (AllReduce(NODE),)),
    "sum over nodes to shards in them": (Residence((), NODE), Residence(LOCAL), NODES, (Slice(LOCAL), AllReduce(NODE))),
    "sum over nodes to shards": (Residence((), NODE), Residence(DATA), NODES, (ReduceScatter(NODE), Slice(LOCAL))),
    "sum inside nodes to shards": (Residence((), LOCAL), Residence(DATA), NODES, (Slice(NODE), ReduceScatter(LOCAL))),
    "sum inside nodes first": (Residence((), DATA), Residence((), NODE), NODES, (AllReduce(LOCAL),)),
    "sum of what is split": (Residence(LOCAL, NODE), Residence(LOCAL), NODES, (AllReduce(NODE),)),
    "sum of what is split, to shards": (Residence(NODE, LOCAL), Residence(DATA), NODES, (ReduceScatter(LOCAL),)),
    "sum of what is split, whole": (Residence(LOCAL, NODE), Residence(), NODES, (AllReduce(NODE), AllGather(LOCAL))),
    "sum over two axes, shards over one": (Residence((), (*DATA, *SEQUENCE)), Residence(DATA), GRID, (
        ReduceScatter(DATA), AllReduce(SEQUENCE))),
    "sum over two axes, shards over both": (Residence((), (*DATA, *SEQUENCE)), Residence((*SEQUENCE, *DATA)), GRID, (
        ReduceScatter(SEQUENCE), ReduceScatter(DATA))),
    "sum, split over another axis as well": (Residence((), DATA), Residence((*TENSOR, *DATA)), GRID, (
        Slice(TENSOR), ReduceScatter(DATA))),
    "encode": (Residence(encoding=FP32), Residence(encoding=BF16), NODES, (Encode(BF16),)),
    "encode before the wire": (Residence(DATA), Residence((), (), BF16), NODES, (Encode(BF16), AllGather(DATA))),
    "encode what is kept": (Residence((), (), BF16), Residence(DATA), NODES, (Slice(DATA), Encode(FP32))),
    "device to host": (Residence(), Residence(tier=HOST), NODES, (Copy(HOST),)),
    "device to disk": (Residence(), Residence(tier=DISK), NODES, (Copy(HOST), Write())),
    "disk to device": (Residence(tier=DISK), Residence(), NODES, (Read(), Copy(DEVICE))),
    "disk to host": (Residence(tier=DISK), Residence(tier=HOST), NODES, (Read(),)),
    "encode on disk": (Residence(tier=DISK), Residence((), (), BF16, DISK), NODES, (Read(), Encode(BF16), Write())),
    "slice on disk": (Residence(tier=DISK), Residence(DATA, tier=DISK), NODES, (Read(), Slice(DATA), Write())),
    "slice on the host": (Residence(tier=HOST), Residence(DATA, tier=HOST), NODES, (Slice(DATA),)),
    "slice, then copy": (Residence(tier=HOST), Residence(DATA), NODES, (Slice(DATA), Copy(DEVICE))),
    "gather from the host": (Residence(DATA, tier=HOST), Residence((), (), BF16), NODES, (
        Encode(BF16), Copy(DEVICE), AllGather(DATA))),
    "gather on the host": (Residence(DATA, tier=HOST), Residence(tier=HOST), NODES, (
        Copy(DEVICE), AllGather(DATA), Copy(HOST))),
    "gather on disk": (Residence(DATA, tier=DISK), Residence(tier=DISK), NODES, (
        Read(), Copy(DEVICE), AllGather(DATA), Copy(HOST), Write())),
    "sum on the host": (Residence((), DATA, BF16, HOST), Residence(DATA, (), FP32, HOST), NODES, (
        Encode(FP32), Copy(DEVICE), ReduceScatter(DATA), Copy(HOST))),
    "a gradient to its shard on the host": (Residence((), DATA, BF16), Residence(DATA, (), FP32, HOST), NODES, (
        Encode(FP32), ReduceScatter(DATA), Copy(HOST))),
    "a partial sum to the host": (Residence((), DATA), Residence((), DATA, tier=HOST), NODES, (Copy(HOST),)),
    "a shard of terms": (Residence((), SEQUENCE), Residence(DATA, SEQUENCE), GRID, (Slice(DATA),)),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_move(name: str) -> None:
    src, dst, mesh, expected = MOVES[name]
    assert check(src, dst, mesh, 2 * mesh.num_ranks) == expected


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (Residence(), Residence((), DATA)),
        (Residence(DATA), Residence((), DATA)),
        (Residence((), NODE), Residence((), DATA)),
        (Residence((), LOCAL), Residence(LOCAL, NODE)),
        (Residence((), TENSOR), Residence((), SEQUENCE)),
    ],
)
def test_a_sum_cannot_be_undone(src: Residence, dst: Residence) -> None:
    with pytest.raises(ValueError, match=r"a sum over .* cannot be undone: Residence\("):
        steps(src, dst, GRID)
    assert steps(src, dst, MeshShape()) == (), "alone there is nothing to add up"


def test_encodings_are_all_tried() -> None:
    assert set(ENCODINGS.values()) == {FP32, BF16, FP16}
