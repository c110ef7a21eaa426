"""Tests of the properties that follow from a row on a mesh, and of buckets of gradients that are reduced together."""

from operator import mul

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from partita.table.mesh_shape import MeshShape
from partita.table.place import Place
from partita.table.planned import PlannedSegment, PlannedUnit, reduction_order
from partita.table.planned_bucket import BUCKET_BYTES, PlannedBucket, share_buckets
from partita.table.residence import BF16, FP32, Encoding, Tier
from partita.table.slots import bytes_ahead, unit_pool
from partita.table.span import QUANTUM, Entry, SegmentLayout, Span, build_layout
from partita.table.state_plan import PRESETS, Encodings, Tiers, preset
from partita.table.steps import Copy, ReduceScatter
from partita.table.strategies import SyncPlan

TWO, NODES = MeshShape(data=2), MeshShape(data=4, node=2)
WHOLE, GATHERED_ONCE = ("ddp", "zero1", "zero2"), ("zero3-kept", "zero3-once")
PLAIN, MIXED, ON_DEVICE = Encodings(), Encodings(compute=BF16), Tiers()


def planned(
    num_elements: int,
    mesh: MeshShape,
    name: str,
    encodings: Encodings = PLAIN,
    tiers: Tiers = ON_DEVICE,
) -> PlannedSegment:
    """Return a segment of ``num_elements`` elements, padding included."""
    span = Span("p", Place((num_elements,)), 0, num_elements, 0)
    layout = SegmentLayout(encodings.compute, True, (span,), mesh.data, num_elements // mesh.data)
    return PlannedSegment(layout, preset(name, encodings, tiers, mesh), mesh)


# ---------------------------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("name", PRESETS)
def test_parameters(name: str) -> None:
    for mesh in (TWO, NODES):
        segment = planned(2048, mesh, name)
        assert (segment.always_unsharded, segment.stays_unsharded) == (name in WHOLE, name in WHOLE + GATHERED_ONCE)
        assert segment.has_secondary == (name == "hierarchical" and mesh is NODES)
        between_nodes = name == "hierarchical-changes" and mesh is NODES
        assert segment.update_is_gathered == (name in ("zero1", "zero2") or between_nodes)
        sizes = {"ddp": 1, "hsdp": mesh.size("local")}
        assert segment.num_shards(segment.row.master) == sizes.get(name, mesh.data)
        assert segment.master_is_parameter
        assert not planned(2048, mesh, name, MIXED).master_is_parameter
    alone = planned(2048, MeshShape(), name)
    assert (alone.always_unsharded, alone.stays_unsharded, alone.has_secondary) == (True, True, False)
    for tier in (Tier.HOST, Tier.DISK):
        away = planned(2048, MeshShape(), name, tiers=Tiers(parameters=tier))
        assert (away.always_unsharded, away.stays_unsharded) == (False, name in GATHERED_ONCE)
        assert not away.master_is_parameter


@pytest.mark.parametrize("name", PRESETS)
def test_gradients(name: str) -> None:
    """Gradients are used in place, collected in resident full storage, or reduced through a pooled buffer."""
    always_unsharded = name in ("ddp", "zero1", "zero3-once")
    for mesh in (TWO, NODES):
        for tiers, encodings in ((ON_DEVICE, PLAIN), (Tiers(gradients=Tier.HOST), PLAIN), (ON_DEVICE, MIXED)):
            segment = planned(2048, mesh, name, encodings, tiers)
            assert (segment.gradients.in_place, segment.gradients.is_resident) == (False, always_unsharded)
            num_reductions = 2 if name in ("hsdp", "hierarchical-changes") and mesh is NODES else 1
            assert segment.gradients.is_pooled != always_unsharded
            assert len(segment.gradients.reductions) == num_reductions
            assert isinstance(segment.gradients.exact.sums[0], ReduceScatter), "they are collected in fp32"
            assert bool(segment.gradients.exact.gathers) == (name == "ddp")
            num_ranks = mesh.group_size(segment.gradients.reductions[0].axes)
            part = segment.gradients.num_bytes // num_ranks
            assert PlannedBucket((segment,)).scratch_bytes(in_pieces=True) == (num_ranks - 1) * part
            assert PlannedBucket((segment,)).scratch_bytes(in_pieces=False) == part
        nowhere = planned(2048, mesh, name, tiers=Tiers(gradients=None))
        assert (nowhere.gradients.is_resident, nowhere.gradients.is_pooled) == (False, True)
    alone = planned(2048, MeshShape(), name)
    assert (alone.gradients.move, alone.gradients.in_place, alone.gradients.is_pooled) == (False, True, False)
    assert (alone.gradients.is_resident, alone.gradients.reductions) == (False, ())
    encoded = planned(2048, MeshShape(), name, MIXED)
    assert (encoded.gradients.move, encoded.gradients.in_place, encoded.gradients.is_resident) == (True, False, True)
    assert encoded.gradients.exact == SyncPlan((), ())
    away = planned(2048, MeshShape(), name, tiers=Tiers(gradients=Tier.HOST))
    assert (away.gradients.is_pooled, away.gradients.exact) == (True, SyncPlan((Copy(Tier.HOST),), ()))
    nowhere = planned(2048, MeshShape(), name, tiers=Tiers(gradients=None))
    assert (nowhere.gradients.in_place, nowhere.gradients.is_pooled) == (False, True)


@given(st.lists(st.tuples(st.integers(1, 900), st.sampled_from([FP32, BF16])), min_size=1), st.integers(1, 5))
def test_bytes_of_a_unit(sizes: list[tuple[int, Encoding]], num_shards: int) -> None:
    entries = [Entry(str(number), (size,), encoding, True) for number, (size, encoding) in enumerate(sizes)]
    mesh = MeshShape(data=num_shards)
    segments = tuple(
        PlannedSegment(layout, preset("zero3", Encodings(layout.encoding)), mesh)
        for layout in build_layout(entries, num_shards)
    )
    padded = [segment.layout.num_shards * segment.layout.shard_elements for segment in segments]
    itemsizes = [segment.layout.encoding.itemsize for segment in segments]
    assert PlannedUnit("unit", segments).num_bytes == sum(map(mul, padded, itemsizes))
    for segment in segments:
        held = [segment.spans_of(segment.row.master, rank) for rank in range(num_shards)]
        assert held == [segment.layout.part(rank) for rank in range(num_shards)]
        assert segment.spans_of(segment.row.param_compute, 0) == segment.layout.spans
        assert segment.held_bytes(segment.row.param_stored) == segment.layout.num_bytes // num_shards


# -------------------------------------------------------------------------------------- the buffer pool of units


def units_of(sizes: list[int], name: str, root: int = 0) -> list[PlannedUnit]:
    blocks = [PlannedUnit(f"blocks.{n}", (planned(size, TWO, name),), ("",)) for n, size in enumerate(sizes)]
    return [PlannedUnit("", (planned(root, TWO, name),))] * bool(root) + blocks


def test_what_rests_whole_needs_no_slot() -> None:
    units = units_of([1024] * 5, "zero2", root=4096)
    assert (unit_pool(units, "auto").num_bytes, bytes_ahead(units, "auto")) == (0, 0)


def test_a_unit_in_use_and_one_ahead() -> None:
    """The pool has slots for one unit in use and one ahead.

    The root, which contains the other units, keeps its slot. More prefetched bytes need more slots.
    """
    units = units_of([1024] * 5, "zero3")
    assert bytes_ahead(units, "auto") == 4 * 1024
    assert unit_pool(units, "auto").num_bytes == 2 * 4 * 1024
    assert unit_pool(units, 0).num_bytes == 2 * 4 * 1024, "in backward one is opened before the other is closed"
    assert unit_pool(units, 3 * 4 * 1024).num_bytes == 4 * 4 * 1024
    assert unit_pool(units, 10**9).num_bytes == 5 * 4 * 1024, "never more than there are units"
    with_root = units_of([1024] * 5, "zero3", root=1024)
    assert bytes_ahead(with_root, "auto") == 4 * 1024
    assert unit_pool(with_root, "auto").num_bytes == 3 * 4 * 1024
    large_root = units_of([1024] * 5, "zero3", root=4096)
    assert unit_pool(large_root, "auto").num_bytes == 4 * 4096 + 2 * 4 * 1024


def test_units_that_stay_whole_have_a_slot_each() -> None:
    units = units_of([1024] * 5, "zero3-kept", root=4096)
    assert unit_pool(units, "auto").num_bytes == bytes_ahead(units, "auto") == 4 * (5 * 1024 + 4096)


# ------------------------------------------------------------------------------------------------------ sharing buckets


@given(
    st.lists(st.integers(1, 40), max_size=12),
    st.integers(1, 4),
    st.sampled_from(list(PRESETS)),
    st.integers(1, 60).map(lambda quanta: quanta * QUANTUM * 4),
)
@example([1, 1, 1], 2, "zero1", 2 * 2 * QUANTUM * 4)
def test_neighbours_share_buckets_while_they_fit(quanta: list[int], num_ranks: int, name: str, most: int) -> None:
    mesh, row = MeshShape(data=num_ranks), preset(name)
    segments = [planned(num * QUANTUM * num_ranks, mesh, name) for num in quanta]
    buckets = share_buckets(segments, most)
    assert [segment for bucket in buckets for segment in bucket.segments] == segments
    shares = mesh.group_size(row.grad_step.shard_axes) > 1
    held = [bucket.num_bytes for bucket in buckets]
    assert all(len(bucket.segments) == 1 or (shares and bucket.num_bytes <= most) for bucket in buckets)
    for size, following in zip(held, buckets[1:], strict=False):
        assert not shares or size + following.segments[0].layout.padded * 4 > most, "the next one does not fit"


def test_small_segments_share_a_bucket_in_the_order_of_backward() -> None:
    half = BUCKET_BYTES // 4 // 2
    units = units_of([half, half, half, 3 * half], "zero2")
    one, two, three, four = reduction_order(units)
    assert [segment.layout.padded // half for segment in (one, two, three, four)] == [3, 1, 1, 1]
    buckets = share_buckets([one, two, three, four])
    assert [len(bucket.segments) for bucket in buckets] == [1, 2, 1]
    assert [len(bucket.segments) for bucket in share_buckets([one, two, three, four], max_bytes=0)] == [1] * 4


def test_whole_gradients_have_buckets_of_their_own() -> None:
    buckets = share_buckets(reduction_order(units_of([1024, 1024], "ddp")))
    assert [len(bucket.segments) for bucket in buckets] == [1, 1]


def test_the_size_of_a_bucket_is_that_of_what_travels() -> None:
    """Buckets of gradients that are communicated in 2 bytes have twice as many elements as those in 4 bytes."""
    num_elements = BUCKET_BYTES // 4
    half = planned(num_elements, TWO, "zero2", Encodings(BF16, FP32, BF16))
    assert [len(bucket.segments) for bucket in share_buckets([half, half])] == [2]
    assert [len(bucket.segments) for bucket in share_buckets([planned(num_elements, TWO, "zero2")] * 2)] == [1, 1]
