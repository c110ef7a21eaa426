"""Every activation setting computes the same numbers as none, with dropout, at every stage, in every tier, on every
axis: bit for bit, except in tiles, where sums have another order.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tests.activation.test_activation_partition import course, gpt2, llama
from tests.kit.plans import PLANS, matrix
from tests.kit.ranks import on_ranks

UNITS: dict[str, Any] = {"checkpoint": "units"}
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "recomputed": {"activations": UNITS},
    "selective": {"activations": {"checkpoint": "selective"}},
    "modules": {"activations": {"checkpoint": ["*.mlp"]}},
    "on disk": {"activations": {**UNITS, "offload": "disk"}},
    "on host": {"activations": {**UNITS, "offload": "host"}},
    "kept": {"activations": {**UNITS, "keep_bytes": "auto"}},
    "tiled feed-forward": {"tiled": {"mlp": ["*.mlp"]}},
}
SPLIT: dict[str, dict[str, Any]] = {
    "split": {"activations": {**UNITS, "partition": True}},
    "split, kept": {"activations": {**UNITS, "partition": True, "keep_bytes": 20000}},
    "split, on disk": {"activations": {**UNITS, "partition": True, "offload": "disk"}},
}
TILED_LOSS: dict[str, Any] = {"activations": UNITS, "loss": {"tiled": 2000}}
MESHES: dict[str, dict[str, int]] = {
    "one": {},
    "data": {"data": 2},
    "tensor": {"tensor": 2},
    "sequence": {"sequence": 2},
    "tensor and data": {"tensor": 2, "data": 2},
    "tensor and sequence": {"tensor": 2, "sequence": 2},
}
PLAN_NAMES = ("0", "1", "2", "3", "3-host", "3-disk")


def courses(build: Callable[[], nn.Module], mesh: str, plan: str) -> dict[str, list[Any]]:
    ways = {**WAYS, **(SPLIT if "tensor" in mesh else {}), **({"tiled loss": TILED_LOSS} if mesh in TILES else {})}
    fixed = {"parallel": MESHES[mesh], **PLANS[plan]}
    return {way: course(build, {**fixed, **config}) for way, config in ways.items()}


TILES = ("one", "data")  # on the other meshes, the logits are split


@pytest.mark.thorough
@matrix(build=(gpt2, llama), mesh=tuple(MESHES), plan=PLAN_NAMES)
def test_activations_are_exact(build: Callable[[], nn.Module], mesh: str, plan: str) -> None:
    world = 1
    for size in MESHES[mesh].values():
        world *= size
    for found in on_ranks(world, courses, build, mesh, plan, timeout=400):
        for way, numbers in found.items():
            if way.startswith("tiled"):
                assert numbers[0] == pytest.approx(found["none"][0], rel=1e-6)  # only the first: later weights differ
            else:
                assert numbers == found["none"], way
