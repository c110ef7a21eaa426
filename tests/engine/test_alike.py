"""Replica check: ranks compare parameters that should be equal; the error names the unit and the ranks that differ."""

from typing import Any

import pytest
import torch

import partita
from partita import PartitaError
from tests.compression.test_wires import on_nodes_of
from tests.kit.models import Stack, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, assert_same_bits, rank, train_recipe

TERNARY: dict[str, Any] = {"gradients": "ternary", "parameters": "ternary"}
# Name: ranks per node, and config sections.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "0": (4, {"zero": {"stage": 0}}),
    "1, bf16": (4, {"zero": {"stage": 1}, "precision": {"compute": "bf16"}}),
    "2, ternary": (4, {"zero": {"stage": 2}, "communication": TERNARY}),
    "1, ternary, between nodes": (1, {"zero": {"stage": 1}, "communication": TERNARY}),
    "hierarchical, ternary": (2, {"zero": {"stage": 3, "hierarchical": True}, "communication": TERNARY}),
    "replicated": (2, {"zero": {"stage": 3, "replicate": "nodes"}}),
    "pipeline": (4, {"zero": {"stage": 1}, "parallel": {"pipeline": 2}, "batch": {"accumulate": 2}}),
    "every": (2, {"zero": {"stage": 1}, "communication": {"every": 3}}),
}


def sections_of(name: str, check_every: int) -> dict[str, Any]:
    sections = RUNS[name][1]
    return {**sections, "communication": {**sections.get("communication", {}), "check_every": check_every}}


def step(engine: partita.Engine, number: int) -> None:
    if engine.mesh.size("pipeline") > 1:
        generator = torch.Generator().manual_seed(10 * number + engine.mesh.coordinate("data"))
        engine.train_batch(iter([torch.randn(2, 16, generator=generator) for _ in range(2)]))
        return
    engine.backward(square_loss(engine, rank(), number).float())
    engine.step()


class Loss(Stack):
    """Stack that returns its loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def replica_check(name: str) -> int:
    """Train five steps with equal replicas. Return the number of comparisons."""
    compared, (per_node, _) = 0, RUNS[name]
    with on_nodes_of(per_node):
        build = Loss if name == "pipeline" else Stack
        with partita.initialize(build(4), sections_of(name, 2)) as engine:
            check = engine._parts.replica_check
            compare = check.compare

            def counted(at_step: int) -> None:
                nonlocal compared
                compared += 1
                compare(at_step)

            check.compare = counted  # type: ignore[method-assign]
            for number in range(5):
                step(engine, number)
    return compared


def differs(name: str, odd: int) -> tuple[str, int]:
    """Change one value on rank ``odd``. Return the error on this rank, and the number of completed steps."""
    per_node, _ = RUNS[name]
    with on_nodes_of(per_node), partita.initialize(Stack(4), sections_of(name, 2)) as engine:
        step(engine, 0)
        engine._parts.updater.wait_for_updates()
        if rank() == odd:
            unit = next(unit for unit in engine._parts.runtime.units if unit.name == "blocks.1")
            unit.segments[0].stored.lease().wait()[-1] += 1.0
        with pytest.raises(PartitaError) as raised:
            for number in range(1, 4):
                step(engine, number)
        return str(raised.value), engine._parts.updater.steps


def by_default(communication: dict[str, Any]) -> int:
    with partita.initialize(Stack(1), {"zero": {"stage": 1}, "communication": communication}) as engine:
        return engine._parts.replica_check._every


def changes_nothing() -> None:
    results = [
        train_recipe(Recipe(lambda: Stack(2), config={"communication": {**TERNARY, "check_every": every}}), ZERO["1"])
        for every in (0, 1)
    ]
    assert_same_bits(*results, "compared in every step")


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_found_where_all_is_alike(name: str) -> None:
    assert on_ranks(4, replica_check, name) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("name", "odd", "like", "among"),
    [
        ("2, ternary", 2, 0, "0, 1, 2, 3"),
        ("1, ternary, between nodes", 0, 1, "0, 1, 2, 3"),
        ("hierarchical, ternary", 3, 1, "1, 3"),
        ("0", 1, 0, "0, 1, 2, 3"),
    ],
)
def test_unit_and_rank_are_named_on_all_ranks(name: str, odd: int, like: int, among: str) -> None:
    expected = (
        f"step 2: rank {odd} has other parameters of blocks.1 than rank {like}; they should have the same bits on "
        f"ranks {among}"
    )
    for said, steps in on_ranks(4, differs, name, odd):
        assert expected in said
        assert steps == 2


@pytest.mark.parametrize(
    ("communication", "expected"),
    [({}, 0), ({"parameters": "int4"}, 100), ({"parameters": "int4", "check_every": 0}, 0), ({"check_every": 7}, 7)],
)
def test_every_hundredth_step_where_changes_travel(communication: dict[str, Any], expected: int) -> None:
    assert on_ranks(2, by_default, communication) == [expected, expected]


def test_it_changes_nothing() -> None:
    on_ranks(2, changes_nothing)
