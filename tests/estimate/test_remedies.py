"""Remedies: what they say that they free is what the table holds less."""

import pytest

from partita.config.schema import Config
from partita.estimate.memory import model_state_bytes
from partita.estimate.remedies import Situation
from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import BF16, Tier
from partita.plan.state_plan import Encodings
from tests.plan.test_estimate import plan

MIXED = Encodings(compute=BF16, gradients=BF16)
UNITS = [[(1024, 1024)]] * 40
NUM = 40 * 1024 * 1024
DEVICE, BOTH = {Tier.DEVICE}, {Tier.DEVICE, Tier.HOST}


def situation(name: str, num_ranks: int, config: dict[str, object]) -> Situation:
    mesh = MeshShape(data=num_ranks)
    return Situation(plan(UNITS, name, mesh, MIXED), Config(**config), mesh, 2)


def test_of_adam_on_one_gpu() -> None:
    """12 of 16 bytes a parameter, and the gradients with them, go with the optimizer, whole stages free nothing."""
    changes = situation("ddp", 1, {"zero": {"stage": 0}}).remedies(DEVICE, 0)
    assert [remedy.change for remedy in changes] == ["zero.offload.optimizer: host", "zero.offload.parameters: host"]
    optimizer, parameters = (remedy.num_bytes / NUM for remedy in changes)
    assert optimizer == pytest.approx(14, abs=1)  # less the slots in which gradients travel
    assert parameters == pytest.approx(2, abs=0.5)


def test_on_a_cpu_only_the_disk_helps() -> None:
    changes = situation("ddp", 1, {"zero": {"stage": 0}}).remedies(BOTH, 0)
    assert {remedy.change.split()[-1] for remedy in changes} == {"disk"}


def test_a_stage_of_many_ranks_frees_the_most() -> None:
    made = situation("zero1", 64, {"zero": {"stage": 1}, "batch": {"micro": 8}})
    first, *others = made.remedies(DEVICE, 10 * NUM)
    assert first.change == "batch.micro: 4, with twice batch.accumulate"
    assert first.num_bytes == 5 * NUM
    assert [remedy.change for remedy in others] == ["zero.stage: 3", "zero.offload.parameters: host"]
    before = sum(model_state_bytes(made.units, made.mesh, None, 2).values())
    after = sum(model_state_bytes(plan(UNITS, "zero3", made.mesh, MIXED), made.mesh, None, 2).values())
    assert others[0].num_bytes == pytest.approx(before - after, rel=0.5)
    assert str(others[0]).startswith("zero.stage: 3 (frees about 1")


def test_nothing_is_left_to_change() -> None:
    config = {"zero": {"stage": 3, "offload": {"parameters": "disk", "optimizer": "disk"}}}
    on_disk = Situation(
        situation("zero3", 1, {})._with("zero3", Config(**config).zero.offload), Config(**config), MeshShape(), 2
    )
    assert on_disk.remedies(BOTH, 0) == []
