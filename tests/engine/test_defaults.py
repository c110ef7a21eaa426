"""Training does not depend on torch's default device and dtype, which the user may set."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from tests.kit import seeds
from tests.kit.models import Stack, inputs
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights

CONFIGS: dict[str, dict[str, Any]] = {
    **{plan: {"zero": zero} for plan, zero in ZERO.items()},
    "lean": {
        "zero": {"stage": 3},
        "precision": {"compute": "bf16", "master": "split", "moments": "int8", "gradients": "in_backward"},
    },
    "offloaded": {"zero": {"stage": 3, "offload": {"optimizer": "disk"}}},
    "low rank": {"communication": {"gradients": "low_rank"}},
    "local steps": {"communication": {"every": 2, "replicas": 2}},
    "onebit_adam": {
        "optimizer": {"name": "onebit_adam"},
        "communication": {"gradients": "onebit", "warmup_steps": 1},
    },
    "onebit_adam, gradients": {
        "optimizer": {"name": "onebit_adam", "sends": "gradients"},
        "communication": {"gradients": "onebit", "parameters": "int8", "warmup_steps": 1},
    },
}


def trained(config: Mapping[str, Any], folder: Path, device: str | None, dtype: torch.dtype) -> dict[str, Tensor]:
    seeds.start()
    model, samples = Stack(1), [inputs(rank(), step) for step in range(4)]
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        with partita.initialize(model, config) as engine:
            for step, sample in enumerate(samples):
                engine.backward(engine(sample).float().square().mean())
                engine.step()
                if step == 1:
                    engine.save(folder)
                    engine.load(folder)
            assert (engine.state_dict() != {}) == (rank() == 0)
            return whole_weights(engine)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def under_defaults(config: Mapping[str, Any], folder: Path) -> None:
    expected = trained(config, folder / "usual", None, torch.float32)
    got = trained(config, folder / "unusual", "meta", torch.bfloat16)
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


@pytest.mark.parametrize("config", CONFIGS)
def test_same_numbers_under_any_defaults(config: str, tmp_path: Path) -> None:
    on_ranks(2, under_defaults, CONFIGS[config], tmp_path)
