"""What follows from a row on a mesh: what rests whole, what is collected where, what lies inside what."""

import pytest

from partita.plan.mesh_shape import MeshShape
from partita.plan.planned import PlannedSegment, PlannedUnit
from partita.plan.residence import BF16, FP32, Tier
from partita.plan.span import Entry, lay_out
from partita.plan.state_plan import PRESETS, Encodings, Tiers, preset
from partita.plan.steps import AllReduce, Copy, ReduceScatter

ALONE, TWO, NODES = MeshShape(), MeshShape(data=2), MeshShape(data=4, node=2)
SHARDED = ("zero3", "zero3-kept", "hierarchical")
WHOLE_GRADIENTS = ("ddp", "zero1")
ON_DEVICE, PLAIN, MIXED = Tiers(), Encodings(), Encodings(compute=BF16)


def segment(name: str, mesh: MeshShape, tiers: Tiers = ON_DEVICE, encodings: Encodings = PLAIN) -> PlannedSegment:
    layout = lay_out("unit", [Entry("weight", (300,), encodings.compute, True)], mesh.data).segments[0]
    return PlannedSegment(layout, preset(name, encodings, tiers, mesh))


def unit(name: str, *aliases: str) -> PlannedUnit:
    return PlannedUnit(name, (segment("zero3", TWO),), aliases)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters(name: str) -> None:
    for mesh in (TWO, NODES):
        planned = segment(name, mesh)
        assert planned.rests_whole(mesh) == (name not in SHARDED)
        assert planned.stays_whole(mesh) == (name not in ("zero3", "hierarchical"))
    alone = segment(name, ALONE)
    assert (alone.rests_whole(ALONE), alone.stays_whole(ALONE)) == (True, True)
    for tier in (Tier.HOST, Tier.DISK):
        away = segment(name, ALONE, Tiers(parameters=tier))
        assert not away.rests_whole(ALONE), "what rests elsewhere goes through a buffer pool"
        assert away.stays_whole(ALONE) == (name == "zero3-kept")


@pytest.mark.parametrize("name", PRESETS)
def test_gradients(name: str) -> None:
    reduction = AllReduce if name == "ddp" else ReduceScatter
    for mesh in (TWO, NODES):
        planned = segment(name, mesh)
        assert not planned.gradient_in_place(mesh)
        assert planned.gradient_rests_whole(mesh) == (name in WHOLE_GRADIENTS)
        assert planned.gradient_passes(mesh) == (name not in WHOLE_GRADIENTS)
        assert planned.gradient_is_reduced(mesh)
        assert [type(op) for op in planned.gradient_steps(mesh)] == [reduction]
        mixed = segment(name, mesh, encodings=MIXED)
        assert [type(op) for op in mixed.gradient_steps(mesh)] == [reduction], "they are collected in fp32"
    alone = segment(name, ALONE)
    assert (alone.gradient_in_place(ALONE), alone.gradient_rests_whole(ALONE)) == (True, False)
    assert (alone.gradient_passes(ALONE), alone.gradient_is_reduced(ALONE)) == (False, False)
    encoded = segment(name, ALONE, encodings=MIXED)
    assert (encoded.gradient_in_place(ALONE), encoded.gradient_rests_whole(ALONE)) == (False, True)
    away = segment(name, ALONE, Tiers(gradients=Tier.HOST))
    assert (away.gradient_passes(ALONE), away.gradient_steps(ALONE)) == (True, (Copy(Tier.HOST),))


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_that_rest_nowhere_pass(name: str) -> None:
    for mesh in (ALONE, TWO):
        planned = segment(name, mesh, Tiers(gradients=None))
        assert planned.gradient_passes(mesh)
        assert not planned.gradient_in_place(mesh)


def test_what_lies_inside_a_unit() -> None:
    root, block, inner, other = unit(""), unit("layers.1"), unit("layers.1.mlp"), unit("layers.10")
    assert [root.contains(one) for one in (root, block, inner, other)] == [False, True, True, True]
    assert [block.contains(one) for one in (root, block, inner, other)] == [False, False, True, False]
    shared = unit("a.shared", "b.shared")
    assert (unit("a").contains(shared), unit("b").contains(shared)) == (True, True)
    assert (shared.contains(unit("a.shared.x")), shared.contains(unit("c", "b.shared.x"))) == (True, True)


def test_bytes_of_a_unit() -> None:
    layout = lay_out("unit", [Entry("a", (300,), FP32, True), Entry("b", (10,), BF16, False)], 2)
    planned = PlannedUnit("unit", tuple(PlannedSegment(part, preset("zero3")) for part in layout.segments))
    assert planned.num_bytes == layout.num_bytes == 2 * 256 * 4 + 2 * 256 * 2
