"""Buckets without communication: the position of each gradient element, and the accumulated values."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from partita.layout.parameters import ParameterInfo
from partita.memory.allocate import over
from partita.memory.buffer_pool import Slot
from partita.memory.ledger import Ledger
from partita.memory.tiers import InMemory, StateMemory
from partita.sharding.buckets import Bucket
from partita.sharding.gradient_buffer import BucketLayout, InPlaceBuffer, PooledBuffer, ResidentBuffer
from partita.sharding.parameter import Member
from partita.sharding.runtime import make_buckets
from partita.sharding.segment import Segment
from partita.sharding.unit import Unit
from partita.table.mesh_shape import MeshShape
from partita.table.planned import PlannedSegment, PlannedUnit, reduction_order
from partita.table.planned_bucket import BUCKET_BYTES, share_buckets
from partita.table.residence import BF16, FP32, Tier
from partita.table.span import Entry, build_layout
from partita.table.state_plan import PRESETS, Encodings, Tiers, preset
from partita.table.steps import AllGather, Copy, ReduceScatter
from tests.kit import seeds

CPU = torch.device("cpu")
Shapes = list[list[tuple[int, ...]]]
# A list of shapes for each segment of a bucket.
SHAPES: st.SearchStrategy[Shapes] = st.lists(
    st.lists(st.lists(st.integers(0, 30), max_size=2).map(tuple), min_size=1, max_size=4), min_size=1, max_size=3
)
PLAIN, ON_DEVICE = Encodings(), Tiers()
WHOLE, SHARDED = (
    ["ddp", "zero1", "zero3-once"],
    ["zero2", "zero3", "zero3-kept", "hierarchical", "hierarchical-changes", "hsdp"],
)


def segment_of(
    number: int,
    shapes: Sequence[tuple[int, ...]],
    mesh: MeshShape,
    name: str,
    encodings: Encodings = PLAIN,
    tiers: Tiers = ON_DEVICE,
    *,
    rank: int = 0,
) -> tuple[Segment, list[Member]]:
    """Return a segment with one parameter per shape, all of them 0, and its members."""
    entries = [Entry(f"{number}.{index}", shape, FP32, True) for index, shape in enumerate(shapes)]
    row = preset(name, encodings, tiers, mesh)
    layout = build_layout(
        entries, mesh.group_size(row.gradient_shard_axes), lambda _: mesh.group_size(row.gradient_replica_axes)
    )[0]
    segment = Segment(PlannedSegment(layout, row, mesh), rank)
    members = [
        Member(ParameterInfo(nn.Parameter(torch.zeros(span.place.sizes)), [span.fqn]), span, segment)
        for span in layout.spans
    ]
    return segment, members


def new_bucket(segments: Sequence[Segment], members: Sequence[Member], mesh: MeshShape) -> Bucket:
    """Return a bucket that does not divide gradients."""
    bucket = Bucket(BucketLayout(segments, members), 1, Ledger())
    bucket.divisor = 1
    return bucket


def bucket_of(
    shapes: Shapes,
    mesh: MeshShape,
    name: str,
    encodings: Encodings = PLAIN,
    tiers: Tiers = ON_DEVICE,
    *,
    rank: int = 0,
) -> Bucket:
    made = [segment_of(number, group, mesh, name, encodings, tiers, rank=rank) for number, group in enumerate(shapes)]
    return new_bucket([segment for segment, _ in made], [member for _, members in made for member in members], mesh)


def state_memory() -> StateMemory:
    """Return memory for states, without a disk."""
    return StateMemory(CPU, Ledger(), lambda: pytest.fail("nothing rests on disk here"))


def allocated(bucket: Bucket) -> int:
    """Allocate a bucket's gradients. Returns the number of bytes that this took."""
    memory = state_memory()
    bucket.allocate(memory)
    return sum(memory.ledger.report(CPU).held.values())


def places(bucket: Bucket, member: Member) -> list[tuple[int, int]]:
    """Return the row and column of each element of a member, from the segments' layouts only."""
    sizes = [segment.layout.shard_elements for segment in bucket.segments]
    first = [0, *accumulate(sizes)][next(i for i, s in enumerate(bucket.segments) if s is member.segment)]
    cut = member.segment.layout.shard_elements
    found = []
    for element in range(member.span.num_elements):
        row, column = divmod(member.span.offset + element, cut)
        found.append((row, first + column))
    return found


def filled(bucket: Bucket, seed: int = 0, scale: float = 1.0) -> dict[int, Tensor]:
    """Give every member a random gradient. Returns copies by the member's id."""
    generator = seeds.generator(seed)
    grads = {}
    for member in bucket.members:
        grad = torch.randint(-64, 64, tuple(member.shape), generator=generator) * scale
        member.param.grad = grad
        grads[id(member)] = grad.clone()
    return grads


def with_room(bucket: Bucket) -> Tensor:
    """Give a bucket memory for its gradients: a slot of NaNs if it is pooled. Returns it as ``[rows, columns]``."""
    bucket.allocate(state_memory())
    if bucket.buffer.keeps_full:
        assert isinstance(bucket.shard, InMemory)
        storage = bucket.shard.tensor.untyped_storage()
    else:
        storage = torch.full((bucket.layout.num_elements,), math.nan, dtype=bucket.dtype).untyped_storage()
        assert isinstance(bucket.buffer, PooledBuffer)
        bucket.buffer.borrow(Slot(storage, bucket.num_bytes))
    return over(storage, bucket.dtype, bucket.layout.num_elements).view(bucket.layout.num_rows, -1)


# ------------------------------------------------------------------------------------------------------------ layout


@given(SHAPES, st.integers(1, 6), st.sampled_from(list(PRESETS)))
def test_pieces_are_where_the_layout_says(shapes: Shapes, num_ranks: int, name: str) -> None:
    bucket = bucket_of(shapes, MeshShape(data=num_ranks), name)
    assert bucket.layout.num_rows == num_ranks
    assert bucket.layout.num_columns == sum(segment.layout.shard_elements for segment in bucket.segments)
    assert bucket.layout.num_elements == sum(segment.layout.padded for segment in bucket.segments)
    for member in bucket.members:
        lying = [
            (piece.row, piece.column + index)
            for piece in bucket.layout.pieces[id(member)]
            for index in range(piece.stop - piece.start)
        ]
        elements = [element for piece in bucket.layout.pieces[id(member)] for element in range(piece.start, piece.stop)]
        assert elements == list(range(member.span.num_elements))
        assert lying == places(bucket, member)


@given(SHAPES, st.integers(1, 6))
def test_gaps_are_what_no_parameter_covers(shapes: Shapes, num_ranks: int) -> None:
    bucket = bucket_of(shapes, MeshShape(data=num_ranks), "zero2")
    covered = torch.zeros(bucket.layout.num_rows, bucket.layout.num_columns, dtype=torch.int64)
    for member in bucket.members:
        for row, column in places(bucket, member):
            covered[row, column] += 1
    for row, begin, end in bucket.layout.gaps:
        assert begin < end
        covered[row, begin:end] += 1
    assert bool((covered == 1).all())


@pytest.mark.parametrize("name", PRESETS)
def test_what_rests(name: str) -> None:
    """Gradients are stored as their row says; on one rank, in autograd's dtype, they stay in ``.grad``."""
    shapes: Shapes = [[(300,), (5, 5)], [(1000,)]]
    mixed = Encodings(compute=BF16, gradients=FP32)
    for mesh in (MeshShape(data=2), MeshShape(data=4, node=2)):
        bucket = bucket_of(shapes, mesh, name, rank=1)
        assert (bucket.buffer.collects, bucket.buffer.keeps_full) == (True, name in WHOLE)
        two_sums = mesh.node > 1  # within the node, and over the nodes
        further = {"hsdp": [ReduceScatter, AllGather], "hierarchical-changes": [ReduceScatter]}.get(name, [])
        exact = bucket.layout.planned.gradients.exact
        sums, gathers = exact.sums, exact.gathers
        assert [type(op) for op in sums] == [ReduceScatter, *further * two_sums]
        assert [type(op) for op in gathers] == ([AllGather] if name == "ddp" else [])
        num_bytes = allocated(bucket)
        num_shards = mesh.size("local") if name == "hsdp" else mesh.data
        assert num_bytes == bucket.num_bytes // (1 if name in WHOLE else num_shards)
        assert num_bytes == sum(s.plan.grad_between.num_bytes(s.layout.padded, mesh) for s in bucket.segments)
        assert bucket.shard is not None
        assert bucket.shard.load().shape == (bucket.layout.num_columns,)
        assert bucket.shard.dtype == torch.float32
        assert (bucket.buffer.full is None) == (name in SHARDED)
        assert allocated(bucket) == 0, "only once"
    alone = bucket_of(shapes, MeshShape(), name)
    assert isinstance(alone.buffer, InPlaceBuffer)
    assert (alone.moves, alone.layout.planned.gradients.exact.sums, allocated(alone)) == (False, (), 0)
    encoded = bucket_of(shapes, MeshShape(), name, mixed)
    assert isinstance(encoded.buffer, ResidentBuffer)
    assert (encoded.moves, encoded.layout.planned.gradients.exact.sums) == (False, ())
    assert allocated(encoded) == encoded.num_bytes


@pytest.mark.parametrize("name", PRESETS)
def test_what_leaves_the_device(name: str) -> None:
    """With gradients on the host, only partial sums over several ranks stay on the device."""
    tiers = Tiers(gradients=Tier.HOST)
    split = bucket_of([[(300,)]], MeshShape(data=2), name, tiers=tiers)
    assert (split.buffer.keeps_full, split.moves) == (name in WHOLE, True)
    assert split.plan.grad_step.tier is (Tier.DEVICE if name in WHOLE else Tier.HOST)
    alone = bucket_of([[(300,)]], MeshShape(), name, tiers=tiers)
    assert isinstance(alone.buffer, PooledBuffer)
    assert alone.moves
    assert alone.layout.planned.gradients.exact.sums == (Copy(Tier.HOST),)
    memory = state_memory()
    alone.allocate(memory)
    assert memory.ledger.report(CPU).held == {("gradients", "host"): alone.num_bytes}


# ------------------------------------------------------------------------------------------------------- collecting


@given(SHAPES, st.integers(2, 4), st.sampled_from(["zero2", "zero1"]), st.sampled_from([1, 2, 4]))
def test_gradients_are_added_up_in_their_places(shapes: Shapes, num_ranks: int, name: str, divisor: int) -> None:
    bucket = bucket_of(shapes, MeshShape(data=num_ranks), name)
    bucket.divisor = divisor
    whole, expected = with_room(bucket), torch.zeros(bucket.layout.num_rows, bucket.layout.num_columns)
    for seed in range(3):
        grads = filled(bucket, seed)
        for member in bucket.members:
            bucket.collect(member)
            assert member.param.grad is None
            flat = grads[id(member)].flatten()
            for (row, column), value in zip(places(bucket, member), flat.tolist(), strict=True):
                expected[row, column] += value / divisor
    assert torch.equal(whole, expected)
    assert bucket.arrivals.used == {id(member) for member in bucket.members}
    bucket.fill_up()
    assert torch.equal(whole, expected), "all have arrived"


def test_what_did_not_come_is_zero() -> None:
    bucket = bucket_of([[(300,), (40, 20)], [(7,)]], MeshShape(data=3), "zero2")
    whole, first = with_room(bucket), bucket.members[0]
    first.param.grad = torch.ones(300)
    bucket.fill_up()
    assert whole.sum() == bucket.buffer.total() == 300
    assert bucket.arrivals.used == {id(first)}


@pytest.mark.parametrize("divisor", [1, 3])
def test_gradients_take_the_encoding_of_the_row(divisor: int) -> None:
    """Gradients are cast to the row's dtype before they are divided, so that no precision is lost."""
    bucket = bucket_of([[(300,)]], MeshShape(data=2), "zero2", Encodings(BF16, FP32, FP32))
    bucket.divisor = divisor
    whole = with_room(bucket)
    (member,) = bucket.members
    member.param.data = member.param.data.bfloat16()
    values = torch.arange(256.0).bfloat16()
    member.param.grad = torch.cat([values, values[:44]])
    bucket.collect(member)
    assert whole.dtype == torch.float32
    assert torch.equal(whole.view(-1)[:256], torch.arange(256.0) * (1.0 / divisor))


def test_a_gradient_of_other_strides() -> None:
    values = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    layout = build_layout([Entry("w", (4, 3, 2, 2), FP32, True)], 2)[0]
    segment = Segment(PlannedSegment(layout, preset("zero2"), MeshShape(data=2)), 0)
    member = Member(ParameterInfo(nn.Parameter(values), ["w"]), layout.spans[0], segment)
    bucket = new_bucket([segment], [member], MeshShape(data=2))
    whole = with_room(bucket)
    grad = torch.randn(4, 3, 2, 2)
    member.param.grad = grad.clone()
    bucket.collect(member)
    assert torch.equal(member.shaped(whole.view(-1)[: grad.numel()]), grad)


# ---------------------------------------------------------------------------------------------------------- reduced


@given(SHAPES, st.integers(2, 4), st.sampled_from(list(PRESETS)))
def test_what_the_optimizer_sees(shapes: Shapes, num_ranks: int, name: str) -> None:
    """The optimizer gets the sum of all ranks' gradients, with collectives replaced by a sum of their buffers."""
    mesh = MeshShape(data=num_ranks)
    shared = shapes[:1] if name == "ddp" else shapes  # under ddp, segments share no bucket
    buckets = [bucket_of(shared, mesh, name, rank=rank) for rank in range(num_ranks)]
    sums: list[Tensor] = []
    wholes = [with_room(bucket) for bucket in buckets]
    for rank, bucket in enumerate(buckets):
        grads = list(filled(bucket, seed=rank).values())
        sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
        for member in bucket.members:
            bucket.collect(member)
    total = torch.stack(wholes).sum(0)
    for rank, bucket in enumerate(buckets):
        assert bucket.shard is not None
        bucket.shard.store(total[rank])
        if name == "ddp":
            wholes[rank].copy_(total)
    for number, expected in enumerate(sums):
        owned = []
        for bucket in buckets:
            member = bucket.members[number]
            assert bucket.shard is not None
            shard = bucket.shard.load()
            piece, seen = bucket.owned_slice(member, shard), bucket.optimizer_grad(member, shard)
            owned += [] if piece is None else [piece]
            if name == "ddp":
                assert seen is not None
                assert torch.equal(seen, expected)
            else:
                assert (seen is None) == (piece is None)
                assert seen is None or (piece is not None and torch.equal(seen, piece))
        assert torch.equal(torch.cat([torch.empty(0), *owned]), expected.flatten())


def test_a_gradient_in_place_is_autograds_own() -> None:
    bucket = bucket_of([[(3, 4)]], MeshShape(), "zero3")
    grads, (member,) = filled(bucket), bucket.members
    assert bucket.owned_slice(member, None) is bucket.optimizer_grad(member, None) is member.param.grad
    assert member.param.grad is not None
    assert torch.equal(member.param.grad, grads[id(member)])


@pytest.mark.parametrize("name", PRESETS)
def test_buckets_of_a_model(name: str) -> None:
    """Buckets are in reverse order of the units, and small segments share one except under ``ddp``."""
    large, mesh = BUCKET_BYTES // 4 + 1, MeshShape(data=2)
    units = []
    unused: Any = None  # resources for all-gathers
    for number, shapes in enumerate([[(3,)], [(large,)], [(20,), (5,)], [(10,)]]):
        segment, members = segment_of(number, shapes, mesh, name)
        planned = PlannedUnit(str(number), (segment.planned,))
        units.append(Unit(planned, nn.Module(), {member.fqn: member.info for member in members}, number, 0, unused))
    buckets = make_buckets(share_buckets(reduction_order([unit.planned for unit in units])), units, 3, Ledger())
    assert {bucket.divisor for bucket in buckets} == {2 * 3}
    expected = (
        [["3.0"], ["2.0", "2.1"], ["1.0"], ["0.0"]] if name == "ddp" else [["3.0", "2.0", "2.1"], ["1.0"], ["0.0"]]
    )
    assert [[member.fqn for member in bucket.members] for bucket in buckets] == expected
    order = [segment for unit in reversed(units) for segment in unit.segments]
    assert [segment for bucket in buckets for segment in bucket.segments] == order


def test_a_gather_waits_for_the_values_of_the_shard() -> None:
    bucket = mock.Mock()
    Bucket.gather(bucket, mock.Mock(), set(), 1.0, 1.0)
    sent, *_ = bucket.sync.gather.call_args.args
    assert sent is bucket.shard.lease().wait()
