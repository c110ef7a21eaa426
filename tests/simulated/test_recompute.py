"""Tests of recomputed modules: they save the device's random state, also if they are called with keywords only."""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

import partita
from tests.kit.models import WIDTH, Block
from tests.kit.ranks import on_ranks
from tests.simulated.training import simulated

CONFIGS: dict[str, Mapping[str, Any]] = {
    "units": {"activations": {"checkpoint": "units"}},
    "inputs on host": {"activations": {"checkpoint": "units", "offload": "host"}},
    "tiles": {"tiled": {"mlp": ["Block"]}},
}


class Keywords(nn.Module):
    """A model that calls its blocks with keywords only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x)
        return x.square().mean()


def devices_of_random_states(config: Mapping[str, Any]) -> list[list[int]]:
    """Return, for each recomputed call, the devices whose random states it saves."""
    found, save = list[list[int]](), checkpoint.get_device_states

    def note(*args: Any) -> tuple[list[int], list[Tensor]]:
        devices, states = save(*args)
        found.append(devices)
        return devices, states

    with partita.initialize(Keywords(), {"precision": {"compute": "fp32"}, **config}) as engine:
        is_used = mock.patch.object(torch.get_device_module(engine.device), "_initialized", True, create=True)
        with is_used, mock.patch.object(checkpoint, "get_device_states", note):
            engine.backward(engine(torch.randn(2, WIDTH).to(engine.device)))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_random_state_of_the_device_is_saved(name: str) -> None:
    ((found, races),) = on_ranks(1, simulated, devices_of_random_states, CONFIGS[name], with_group=False)
    assert races == []
    assert len(found) >= 4
    assert all(devices == [0] for devices in found), found
