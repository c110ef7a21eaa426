"""Tests of the table: each preset has the expected row, and its bytes agree with the papers' formulas."""

from dataclasses import replace
from typing import Any

import pytest

from partita.table.mesh_shape import MeshShape, expand
from partita.table.residence import BF16, FP16, FP32, Residence, Tier
from partita.table.state_plan import PRESETS, Encodings, StatePlan, preset, preset_name
from partita.table.steps import AllGather, AllReduce, ReduceScatter, Step, steps
from tests.table.meshes import shapes

# preset | parameters: stored, in compute, between forward and backward | gradients: between micro-batches, at the step
# | master weights and moments.
TABLE = """
ddp          | whole | whole | whole         | partial | whole | whole
zero1        | whole | whole | whole         | partial | shard | shard
zero2        | whole | whole | whole         | shard   | shard | shard
zero3        | shard | whole | shard         | shard   | shard | shard
zero3-kept   | shard | whole | whole         | shard   | shard | shard
zero3-once   | shard | whole | whole         | partial | shard | shard
hierarchical | shard | whole | shard in node | shard   | shard | shard
hierarchical-changes | shard in node | whole | shard in node | shard of that | shard of that | shard of that
hsdp | shard in node | whole | shard in node | shard in node | shard in node | shard in node
"""
ROWS = {line.split()[0]: [cell.strip() for cell in line.split("|")[1:]] for line in TABLE.strip().splitlines()}
WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "whole": ((), ()),
    "partial": ((), ("data", "sequence")),
    "shard": (("data", "sequence"), ()),
    "shard in node": (("local", "sequence"), ()),
    "shard of that": (("local", "sequence", "node"), ()),
}
# Presets that sum gradients first inside nodes, then between nodes.
BETWEEN_NODES = ("hierarchical-changes", "hsdp")
MIXED = Encodings(compute=BF16, master=FP32, gradients=BF16, moments=FP32)


def test_the_table_has_these_rows() -> None:
    assert list(PRESETS) == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str) -> None:
    e = Encodings(compute=BF16, master=FP32, gradients=FP16, moments=FP32)
    row = preset(name, e)
    rest, compute, between, grad_between, grad_step, states = (WORDS[cell] for cell in ROWS[name])
    assert row == StatePlan(
        name=name,
        param_stored=Residence(*rest, BF16),
        param_compute=Residence(*compute, BF16),
        param_between=Residence(*between, BF16),
        grad_arrival=Residence((), ("data", "sequence"), BF16),
        grad_between=Residence(*grad_between, FP16),
        grad_step=Residence(*grad_step, FP16),
        master=Residence(*states, FP32),
        moments=Residence(*states, FP32),
    )


@pytest.mark.parametrize("name", ROWS)
def test_everything_is_fp32_on_the_device_by_default(name: str) -> None:
    row = preset(name)
    assert row == preset(name, Encodings(FP32, FP32, FP32, FP32))
    states = [value for value in vars(row).values() if isinstance(value, Residence)]
    assert len(states) == 8
    assert {state.tier for state in states} == {Tier.DEVICE}
    assert {state.encoding for state in states} == {FP32}


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"stage": 0}, "ddp"),
        ({"stage": 1}, "zero1"),
        ({"stage": 2}, "zero2"),
        ({"stage": 3}, "zero3"),
        ({"stage": 3, "keep_gathered": True}, "zero3-kept"),
        ({"stage": 3, "keep_gathered": True, "keep_gradients": True}, "zero3-once"),
        ({"stage": 3, "hierarchical": True}, "hierarchical"),
        ({"stage": 3, "hierarchical": True, "changes": True}, "hierarchical-changes"),
        ({"stage": 3, "changes": True}, "zero3"),
        ({"stage": 2, "changes": True}, "zero2"),
        ({"stage": 3, "replicated": True}, "hsdp"),
    ],
)
def test_preset_name(choice: dict[str, Any], name: str) -> None:
    assert preset_name(**choice) == name


# ------------------------------------------------------------------------------------------------------------- bytes


def state_bytes(row: StatePlan, num_elements: int, mesh: MeshShape) -> int:
    """Return the bytes of the model states between steps, with two moments."""
    held = (row.param_stored, row.grad_between, row.master, row.moments, row.moments)
    return sum(residence.num_bytes(num_elements, mesh) for residence in held)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 64])
def test_bytes_of_the_papers(num_ranks: int) -> None:
    """Mixed precision with Adam: 16 bytes per parameter (Rajbhandari et al., 2020, section 5 and figure 1)."""
    psi, n, mesh = 7680, num_ranks, MeshShape(data=num_ranks)
    bytes_of = {name: state_bytes(preset(name, MIXED), psi, mesh) for name in PRESETS}
    assert bytes_of == {
        "ddp": 16 * psi,
        "zero1": 4 * psi + 12 * psi // n,
        "zero2": 2 * psi + 14 * psi // n,
        "zero3": 16 * psi // n,
        "zero3-kept": 16 * psi // n,
        "zero3-once": 2 * psi + 14 * psi // n,
        "hierarchical": 16 * psi // n,
        "hierarchical-changes": 16 * psi // n,
        "hsdp": 16 * psi // n,  # all ranks are on one node
    }


def test_every_node_has_the_states_of_the_replicated_row() -> None:
    row, mesh = preset("hsdp", MIXED), MeshShape(data=16, node=4)
    assert state_bytes(row, 8000, mesh) == 16 * 8000 // 4
    assert (row.gradient_shard_axes, row.gradient_replica_axes) == (("local", "sequence"), ("node",))
    assert steps(row.grad_arrival, row.grad_between, mesh) == (ReduceScatter(("local",)), AllReduce(("node",)))


def test_a_rank_updates_a_part_of_what_it_has_of_the_node() -> None:
    row, mesh = preset("hierarchical-changes", MIXED), MeshShape(data=16, node=4)
    assert row.param_stored.num_bytes(8000, mesh) == 2 * 8000 // 4
    assert row.master.num_bytes(8000, mesh) == 4 * 8000 // 16
    assert (row.gradient_shard_axes, row.gradient_replica_axes) == (("local", "sequence", "node"), ())
    assert steps(row.grad_arrival, row.grad_step, mesh) == (ReduceScatter(("local",)), ReduceScatter(("node",)))
    assert steps(row.master, replace(row.param_stored, encoding=FP32), mesh) == (AllGather(("node",)),)
    assert steps(row.master, replace(row.master, shard_axes=()), mesh) == (AllGather(("node",)), AllGather(("local",)))


def test_the_figure_of_the_paper() -> None:
    """7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB (figure 1)."""
    mesh = MeshShape(data=64)
    gigabytes = [state_bytes(preset(name, MIXED), 7_500_000_000, mesh) / 1e9 for name in PRESETS][:4]
    assert [round(number, 1) for number in gigabytes] == [120.0, 31.4, 16.6, 1.9]


def test_gradients_in_fp32_take_two_bytes_more() -> None:
    row = preset("ddp", Encodings(compute=BF16, gradients=FP32))
    assert state_bytes(row, 1000, MeshShape(data=4)) == 18 * 1000


def test_the_second_shard_of_the_hierarchical_row() -> None:
    """The secondary shard takes 2 bytes per parameter, divided by the node's ranks (ZeRO++, section 3.2)."""
    row, mesh = preset("hierarchical", MIXED), MeshShape(data=16, node=4)
    assert row.param_between.num_bytes(8000, mesh) == 2 * 8000 // 4
    assert row.param_stored.num_bytes(8000, mesh) == 2 * 8000 // 16


# ----------------------------------------------------------------------------------------------------------- traffic


def sent(ops: tuple[Step, ...], held: int, mesh: MeshShape) -> int:
    """Return the number of elements that a rank sends in the operations, which begin with ``held`` elements."""
    total = 0
    for op in ops:
        if isinstance(op, AllGather):
            num = mesh.group_size(op.axes)
            total, held = total + (num - 1) * held, num * held
        elif isinstance(op, ReduceScatter | AllReduce):
            num = mesh.group_size(op.axes)
            shares = 1 if isinstance(op, ReduceScatter) else 2
            total += shares * (num - 1) * held // num
            held = held // num if isinstance(op, ReduceScatter) else held
    return total


def moves_of_a_step(row: StatePlan) -> list[tuple[Residence, Residence]]:
    """Return the moves of a step: unshard, reshard, unshard, reduction of gradients, and publication of weights."""
    return [
        (row.param_stored, row.param_compute),
        (row.param_compute, row.param_between),
        (row.param_between, row.param_compute),
        (row.grad_arrival, row.grad_step),
        (row.master, row.param_stored),
    ]


def test_elements_sent_in_a_step() -> None:
    """Stages 0 to 2 send 2P elements, stage 3 sends 3P, in (N - 1) / N terms (Rajbhandari et al., 2020, section 7)."""
    for mesh in shapes(12):
        num, local = mesh.data * mesh.sequence, mesh.size("local") * mesh.sequence
        padded = 8 * num
        once, in_node = padded * (num - 1) // num, padded * (local - 1) // local
        got = {}
        for name in PRESETS:
            moves = moves_of_a_step(preset(name))
            got[name] = sum(sent(steps(a, b, mesh), a.num_elements(padded, mesh), mesh) for a, b in moves)
        assert got == {
            "ddp": 2 * once,
            "zero1": 2 * once,
            "zero2": 2 * once,
            "zero3": 3 * once,
            "zero3-kept": 2 * once,
            "zero3-once": 2 * once,
            "hierarchical": 2 * once + in_node,
            # Both all-gathers and the first reduce-scatter are inside the node; between nodes, the node's shard is
            # reduce-scattered, and the parameter deltas are gathered.
            "hierarchical-changes": 3 * in_node + 2 * (padded // local) * (mesh.node - 1) // mesh.node,
            "hsdp": 3 * in_node + 2 * (padded // local) * (mesh.node - 1) // mesh.node,
        }, mesh


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_are_summed_once(name: str) -> None:
    """Gradients are summed exactly once over each axis, however they are stored between micro-batches."""
    row, mesh = preset(name, MIXED), MeshShape(data=4, node=2)
    path = steps(row.grad_arrival, row.grad_between, mesh) + steps(row.grad_between, row.grad_step, mesh)
    assert sum(isinstance(op, ReduceScatter | AllReduce) for op in path) == (2 if name in BETWEEN_NODES else 1)
    summed = [axis for op in path if isinstance(op, ReduceScatter | AllReduce) for axis in expand(op.axes)]
    assert sorted(summed) == ["local", "node"]


@pytest.mark.parametrize("name", ROWS)
def test_groups_are_those_of_the_moves_and_of_all_ranks(name: str) -> None:
    """A row has a group for every operation that it can need, and no other groups except that of all ranks."""
    apart = [("local",), ("node",)]
    local = {"hierarchical": apart[:1], **dict.fromkeys(BETWEEN_NODES, apart)}.get(name, [])

    def groups(mesh: MeshShape) -> list[tuple[str, ...]]:
        return list(preset(name).groups(mesh))

    assert groups(MeshShape()) == []
    assert groups(MeshShape(data=4)) == [("data",)]
    assert groups(MeshShape(data=4, node=4)) == [("data",)]
    assert groups(MeshShape(data=4, node=2)) == [("data",), *local]
    assert groups(MeshShape(data=4, node=2, tensor=2)) == [("data", "tensor"), ("data",), *local]
