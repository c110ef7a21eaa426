"""Tests of remedies: the bytes that they promise to free agree with the estimated states."""

from dataclasses import replace

import pytest

from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.layout.blueprint import Blueprint
from partita.layout.remedies import changed_units, find_remedies
from partita.layout.state_bytes import model_state_bytes
from partita.table.residence import BF16, Tier
from partita.table.state_plan import Encodings
from tests.layout.test_estimates import plan

MIXED = Encodings(compute=BF16, gradients=BF16)
UNITS = [[(1024, 1024)]] * 40
NUM = 40 * 1024 * 1024
DEVICE, BOTH = {Tier.DEVICE}, {Tier.DEVICE, Tier.HOST}


def blueprint_of(name: str, num_ranks: int, config: dict[str, object]) -> Blueprint:
    resolved = resolve(Config(**config), num_ranks, "cuda")
    return Blueprint(resolved, tuple(plan(UNITS, name, resolved.mesh, MIXED)))


def test_of_adam_on_one_gpu() -> None:
    """Offloading the optimizer of one GPU frees 14 of 16 bytes per parameter (with gradients); stages free nothing."""
    changes = find_remedies(blueprint_of("ddp", 1, {"zero": {"stage": 0}}), DEVICE, 0)
    assert [remedy.change for remedy in changes] == ["zero.offload.optimizer: host", "zero.offload.parameters: host"]
    optimizer, parameters = (remedy.num_bytes / NUM for remedy in changes)
    assert optimizer == pytest.approx(14, abs=1)  # minus the buffers through which gradients pass
    assert parameters == pytest.approx(2, abs=0.5)


def test_on_a_cpu_only_the_disk_helps() -> None:
    changes = find_remedies(blueprint_of("ddp", 1, {"zero": {"stage": 0}}), BOTH, 0)
    assert {remedy.change.split()[-1] for remedy in changes} == {"disk"}


def test_a_stage_of_many_ranks_frees_the_most() -> None:
    made = blueprint_of("zero1", 64, {"zero": {"stage": 1}, "batch": {"micro": 8}})
    first, *others = find_remedies(made, DEVICE, 10 * NUM)
    assert first.change == "batch.micro: 4, with twice batch.accumulate"
    assert first.num_bytes == 5 * NUM
    assert [remedy.change for remedy in others] == ["zero.stage: 3", "zero.offload.parameters: host"]
    before = sum(model_state_bytes(made.units, None).values())
    after = sum(model_state_bytes(plan(UNITS, "zero3", made.resolved.mesh, MIXED), None).values())
    assert others[0].num_bytes == pytest.approx(before - after, rel=0.5)
    assert str(others[0]).startswith("zero.stage: 3 (frees about 1")


def test_nothing_is_left_to_change() -> None:
    config = {"zero": {"stage": 3, "offload": {"parameters": "disk", "optimizer": "disk"}}}
    plain = blueprint_of("zero3", 1, config)
    on_disk = replace(plain, units=tuple(changed_units(plain.units, "zero3", plain.config.zero.offload)))
    assert find_remedies(on_disk, BOTH, 0) == []
