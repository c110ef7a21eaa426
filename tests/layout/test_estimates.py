"""Tests of estimated bytes held and sent, against the papers' formulas and against the table's residences."""

import math
from collections.abc import Sequence
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.layout.operations import Operation, collectives
from partita.layout.state_bytes import Moments, model_state_bytes
from partita.layout.traffic import StepShape, step_traffic
from partita.table.mesh_shape import MeshShape
from partita.table.planned import PlannedSegment, PlannedUnit
from partita.table.residence import BF16, FP32, Encoding, Residence
from partita.table.span import QUANTUM, Entry, build_layout
from partita.table.state_plan import PRESETS, Encodings, preset
from partita.table.steps import Encode, steps
from partita.table.traffic import TrafficCount, TrafficKey, TrafficMeter, TrafficReport

MIXED = Encodings(compute=BF16, gradients=BF16)
DATA = ("data",)
MULTIPLES = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3, "zero3-kept": 2, "zero3-once": 2}

presets = st.sampled_from(sorted(PRESETS))
encodings = st.builds(Encodings, st.sampled_from([FP32, BF16]), st.just(FP32), st.sampled_from([FP32, BF16]))
_SIZES = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (8, 2), (8, 4))
meshes = st.sampled_from([MeshShape(data=data, node=node) for data, node in _SIZES])
shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4)
unit_shapes = st.lists(shapes, min_size=1, max_size=4)


def plan(
    units: Sequence[Sequence[tuple[int, ...]]],
    name: str,
    mesh: MeshShape,
    used: Encodings,
    *,
    frozen: Sequence[int] = (),
) -> list[PlannedUnit]:
    """Return units with parameters of the given shapes; the units with numbers in ``frozen`` do not train."""
    planned = []
    for number, shapes_of_unit in enumerate(units):
        trains = number not in frozen
        entries = [Entry(f"{number}.{i}", shape, used.compute, trains) for i, shape in enumerate(shapes_of_unit)]
        layouts = build_layout(entries, mesh.data)
        segments = tuple(PlannedSegment(layout, preset(name, used), mesh) for layout in layouts)
        planned.append(PlannedUnit(str(number), segments))
    return planned


def padded_elements(units: Sequence[PlannedUnit]) -> int:
    return sum(segment.layout.padded for unit in units for segment in unit.segments)


def total(held: dict[tuple[str, str], int]) -> int:
    return sum(held.values())


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 64])
@pytest.mark.parametrize(
    ("name", "whole", "split"),
    [
        ("ddp", 16, 0),
        ("zero1", 4, 12),
        ("zero2", 2, 14),
        ("zero3", 0, 16),
        ("zero3-kept", 0, 16),
        ("zero3-once", 2, 14),
    ],
)
def test_bytes_of_adam_in_mixed_precision_are_the_papers(name: str, whole: int, split: int, num_ranks: int) -> None:
    mesh = MeshShape(data=num_ranks)
    units = plan([[(1024, 1024)]] * 3, name, mesh, MIXED)  # these sizes need no padding
    num = 3 * 1024 * 1024
    for rank in {0, num_ranks - 1}:
        assert total(model_state_bytes(units, rank)) == whole * num + split * num // num_ranks


def test_fp32_gradients_and_parameters_make_it_18_and_16_bytes() -> None:
    mesh = MeshShape()
    units = plan([[(1024, 1024)]], "ddp", mesh, Encodings(compute=BF16))
    assert total(model_state_bytes(units, 0)) == 18 * 2**20
    units = plan([[(1024, 1024)]], "ddp", mesh, Encodings())
    held = model_state_bytes(units, 0)
    assert total(held) == 16 * 2**20
    assert ("master", "device") not in held  # the parameters are the master weights


@given(unit_shapes, presets, meshes, encodings, st.integers(0, 3))
def test_ranks_together_hold_what_the_table_says(
    units: list[list[tuple[int, int]]], name: str, mesh: MeshShape, used: Encodings, num_moments: int
) -> None:
    planned = plan(units, name, mesh, used)
    row, padded, num = preset(name, used), padded_elements(planned), sum(math.prod(s) for unit in units for s in unit)
    every = [model_state_bytes(planned, rank, Moments(num_moments)) for rank in range(mesh.data)]

    def over_ranks(state: str) -> int:
        return sum(held.get((state, "device"), 0) for held in every)

    def copies(residence: Residence) -> int:
        return mesh.data // mesh.group_size(residence.shard_axes)

    second = copies(row.param_between) if 1 < mesh.size("local") < mesh.data and name == "hierarchical" else 0
    assert over_ranks("parameters") == padded * used.compute.itemsize * (copies(row.param_stored) + second)
    assert over_ranks("master") == (0 if used.compute == FP32 else padded * 4 * copies(row.master))
    assert over_ranks("moments") == num * 4 * num_moments * copies(row.moments)
    in_place = mesh.data == 1 and used.compute == used.gradients
    gradients = num if in_place else padded * copies(row.grad_between)
    assert over_ranks("gradients") == gradients * used.gradients.itemsize


def test_moments_follow_the_cuts() -> None:
    """A rank has the moments of its shard: two of three parameters of up to one quantum, and the third one."""
    mesh = MeshShape(data=2)
    units = plan([[(100,), (200,), (QUANTUM,)]], "zero1", mesh, Encodings())
    held = [model_state_bytes(units, rank)["moments", "device"] for rank in range(2)]
    assert held == [2 * 4 * 300, 2 * 4 * QUANTUM]


@given(unit_shapes, presets, meshes, st.lists(st.integers(0, 2), min_size=1), st.integers(2, 3))
def test_some_parameters_have_fewer_moments(
    units: list[list[tuple[int, int]]], name: str, mesh: MeshShape, numbers: list[int], most: int
) -> None:
    planned = plan(units, name, mesh, Encodings())
    spans = [span for unit in planned for segment in unit.segments for span in segment.layout.spans]
    moments = Moments(most, {span.fqn: number for span, number in zip(spans[1:], cycle(numbers), strict=False)})
    held = [model_state_bytes(planned, rank, moments).get(("moments", "device"), 0) for rank in range(mesh.data)]
    num = sum(moments.of(span.fqn) * span.num_elements for span in spans)
    row = preset(name, Encodings())
    assert sum(held) == 4 * num * (mesh.data // mesh.group_size(row.moments.shard_axes))
    bound = model_state_bytes(planned, None, moments).get(("moments", "device"), 0)
    assert max(held) <= bound <= model_state_bytes(planned, None, Moments(most))["moments", "device"]


def test_bound_of_fewer_moments() -> None:
    """The bound assumes a shard with the vector, which has two moments, filled up with elements of the matrix."""
    units = plan([[(1024, QUANTUM), (QUANTUM,)]], "zero1", MeshShape(data=2), Encodings())
    (matrix, _) = units[0].segments[0].layout.spans
    moments = Moments(2, {matrix.fqn: 1})
    held = [model_state_bytes(units, rank, moments)["moments", "device"] for rank in range(2)]
    assert model_state_bytes(units, None, moments)["moments", "device"] >= max(held)
    shard = units[0].segments[0].layout.shard_elements
    assert model_state_bytes(units, None, moments)["moments", "device"] <= 4 * (shard + 2 * QUANTUM)


def test_frozen_parameters_have_no_other_states() -> None:
    mesh = MeshShape(data=2)
    units = plan([[(512, 4)], [(512, 4)]], "zero1", mesh, MIXED, frozen=[0])
    assert model_state_bytes(units, 0) == {
        ("parameters", "device"): 2 * 2 * 2048,
        ("gradients", "device"): 2 * 2048,
        ("master", "device"): 4 * 1024,
        ("moments", "device"): 8 * 1024,
    }


# -- traffic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("encoding", [FP32, BF16])
@pytest.mark.parametrize(("name", "multiple"), list(MULTIPLES.items()))
def test_a_step_sends_two_or_three_times_the_parameters(
    name: str, multiple: int, encoding: Encoding, num_ranks: int
) -> None:
    mesh = MeshShape(data=num_ranks)
    units = plan([[(1000, 30), (7,)]] * 3, name, mesh, Encodings(compute=encoding, gradients=encoding))
    report = step_traffic(units)
    elements = padded_elements(units)
    expected = multiple * elements * encoding.itemsize * (num_ranks - 1) // num_ranks
    assert report.sent_bytes("parameters") + report.sent_bytes("gradients") == expected
    assert report.sent_bytes("control") < 8 * 20 * num_ranks
    assert bool(report.rows) == (num_ranks > 1)


@given(unit_shapes, st.sampled_from(sorted(MULTIPLES)), meshes, encodings, st.integers(1, 4))
def test_accumulation_repeats_what_is_not_whole(
    units: list[list[tuple[int, int]]], name: str, mesh: MeshShape, used: Encodings, accumulate: int
) -> None:
    planned, row = plan(units, name, mesh, used), preset(name, used)
    once, often = step_traffic(planned), step_traffic(planned, StepShape(accumulate))
    num_gathers = accumulate if row.param_stored.shard_axes else 1
    num_reductions = accumulate if row.grad_between.shard_axes else 1
    assert often.sent_bytes("parameters") == num_gathers * once.sent_bytes("parameters")
    assert often.sent_bytes("gradients") == num_reductions * once.sent_bytes("gradients")
    for num_reduced in (0, 1):
        no_sync = step_traffic(planned, StepShape(accumulate, num_reduced))
        assert no_sync.sent_bytes("gradients") == once.sent_bytes("gradients")


def test_wire_of_gradients_and_parameters_have_their_own_encodings() -> None:
    mesh = MeshShape(data=4)
    units = plan([[(1024, 4)]], "zero1", mesh, Encodings(compute=BF16, gradients=FP32))
    report = step_traffic(units)
    assert report.sent_bytes("gradients") == 4 * 1024 * 3
    assert report.sent_bytes("parameters") == 2 * 1024 * 3


@pytest.mark.parametrize(("accumulate", "num_near"), [(1, 1), (3, 5)])
def test_hierarchical_gathers_inside_the_node_after_the_first_forward(accumulate: int, num_near: int) -> None:
    mesh = MeshShape(data=8, node=2)
    units = plan([[(8 * QUANTUM, 4)]], "hierarchical", mesh, Encodings())
    rows = step_traffic(units, StepShape(accumulate)).rows
    num_bytes = 8 * QUANTUM * 4 * 4
    assert rows[TrafficKey("all_gather", ("data",), "parameters")] == TrafficCount(1, num_bytes * 7 // 8)
    near = TrafficCount(num_near, num_near * num_bytes * 3 // 4)
    assert rows[TrafficKey("all_gather", ("local",), "parameters")] == near


# ``syncs_each_micro_batch``: ranks exchange a message after each micro-batch, but not if all parameters are unsharded.
@pytest.mark.parametrize(
    ("name", "syncs_each_micro_batch", "num_messages"), [("zero3", True, 3), ("zero3", False, 0), ("zero2", True, 0)]
)
def test_messages_are_counted_to_the_byte(name: str, syncs_each_micro_batch: bool, num_messages: int) -> None:
    mesh = MeshShape(data=4)
    units = plan([[(64, 64), (64,)], [(64, 64)]], name, mesh, Encodings())
    key = TrafficKey("all_gather", DATA, "control")
    used = 3 * 8 + 1 + 3  # three numbers, one bucket, three parameters
    shape = StepShape(accumulate=3, returns_loss=True, syncs_each_micro_batch=syncs_each_micro_batch)
    num_words = num_messages + 2  # the number of micro-batches and the loss
    at_norm = 3 * 8  # the norm, the gradients' scale, and a flag of written gradients
    assert step_traffic(units, shape).rows[key] == TrafficCount(num_words + 2, 3 * (8 * num_words + used + at_norm))


def test_frozen_units_are_gathered_and_nothing_else() -> None:
    mesh = MeshShape(data=2)
    sizes = [[(512, 4)], [(512, 4)]]
    report = step_traffic(plan(sizes, "zero3", mesh, Encodings(), frozen=[0]))
    assert report.sent_bytes("parameters") == 2 * 2 * 4 * 1024
    assert report.sent_bytes("gradients") == 4 * 1024


def test_steps_send_in_the_encoding_they_move() -> None:
    mesh = MeshShape(data=4)
    partial, whole = Residence((), DATA, BF16), Residence((), (), FP32)
    assert list(collectives(steps(partial, whole, mesh), partial, 4096, mesh)) == [
        Operation("reduce_scatter", DATA, 3 * 4096),
        Operation("all_gather", DATA, 3 * 4096),
    ]
    assert list(collectives([Encode(BF16)], Residence(DATA), 4096, mesh)) == []


# -- reports -----------------------------------------------------------------------------------------------------------


def test_report_between_two_moments() -> None:
    meter = TrafficMeter()
    gradients, control = TrafficKey("reduce_scatter", DATA, "gradients"), TrafficKey("all_gather", DATA, "control")
    meter.add(gradients, 100)
    meter.add(control, 8)
    before = meter.report()
    meter.add(gradients, 60, calls=2)
    after = meter.report()
    assert after.since(before) == TrafficReport({gradients: TrafficCount(2, 60)})
    assert before.sent_bytes() == 108  # a report does not change afterwards
    assert after.sent_bytes("gradients") == 160
    assert "reduce_scatter  data          gradients          3       0.000" in str(after)
